"""Predictions held against tables of real runs."""
