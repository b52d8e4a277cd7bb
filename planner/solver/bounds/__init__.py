"""Lower bounds of a partition problem, without looking for a split."""
