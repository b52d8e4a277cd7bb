"""meshwright is the front door: one function and one command for each thing a user asks."""
