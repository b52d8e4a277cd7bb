"""Answers as text and as JSON."""
