"""Choice of the plan to measure next, and the lesson of its measurement for all others."""
