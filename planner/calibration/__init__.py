"""Predictions beside what was measured: tables of real runs, scores, fitted constants."""
