"""Traces of a forward: the tracer, the trace, its replay and its costs on meta tensors."""
