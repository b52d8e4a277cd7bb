"""Pipelines of two stages a rank over chains of unlike layers: the exact split."""
