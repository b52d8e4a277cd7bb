"""Predictions compared with tables of real runs."""
