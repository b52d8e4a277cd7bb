"""A layout as a partition problem: what its ranks and stages may contain."""
