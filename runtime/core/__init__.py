"""Shared by the runtime: mesh, collectives, batches, loss, pinned memory, torch internals."""
