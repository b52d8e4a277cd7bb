"""Studies of hardware and the server of their pages."""
