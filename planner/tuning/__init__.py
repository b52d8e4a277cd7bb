"""Which plan to measure next, and what its measurement tells about all the others."""
