"""Models as figures: architectures, their parameters, one layer as a table of operators."""
