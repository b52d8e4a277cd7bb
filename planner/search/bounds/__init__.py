"""Bounds of many families of layouts at once: the same arithmetic on arrays."""
