"""The spaces of a search: the layouts of each kind of request, their bounds and their splits."""
