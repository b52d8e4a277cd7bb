"""Losses of a script: tried before training, made what adds up, and made in chunks."""
