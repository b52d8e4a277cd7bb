"""What one process does beside its work: packages it loads, stdout, files it writes."""
