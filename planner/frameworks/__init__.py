"""Frameworks and the layouts they execute: the runtime's own list, the rules of others."""
