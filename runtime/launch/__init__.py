"""Ranks: started, supervised, reported; the training loop they run."""
