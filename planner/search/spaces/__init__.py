"""Searches over single layouts: where devices differ, and where layers form a graph."""
