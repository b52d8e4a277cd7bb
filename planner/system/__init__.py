"""Services of one process beside its work: packages it loads, stdout, files it writes."""
