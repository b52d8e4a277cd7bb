"""Trials of plans and the command that tunes."""
