"""Checkpoints: save, load, reshard, export of weights."""
