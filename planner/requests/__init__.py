"""Requests to the planner, with all that the user fixed."""
