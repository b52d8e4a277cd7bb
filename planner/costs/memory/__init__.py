"""Bytes of a rank: states, the caching allocator, host memory, the peak."""
