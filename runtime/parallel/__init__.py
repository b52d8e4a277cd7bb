"""Parallelism: data, tensor, context and expert axes, attention, batch norm."""
