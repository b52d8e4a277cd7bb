"""Tables of real runs: the only package that knows their columns."""
