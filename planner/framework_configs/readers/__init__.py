"""Configurations of other frameworks, read as plans; nothing in them is executed."""
