"""Architectures of models: configurations, families, parameters."""
