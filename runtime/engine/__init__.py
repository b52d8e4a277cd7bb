"""The Engine: applies a plan to a module and runs training steps."""
