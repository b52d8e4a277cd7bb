"""The Python interface and the commands as functions."""
