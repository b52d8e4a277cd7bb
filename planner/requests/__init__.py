"""What is asked of the planner: one request, with what the user fixed."""
