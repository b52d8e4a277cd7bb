"""Launches: on this machine, on a scheduler, over ssh, elastic over several nodes."""
