"""Techniques of one unit: activation checkpointing and offload, compile, float8, LoRA."""
