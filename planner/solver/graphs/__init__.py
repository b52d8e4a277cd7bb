"""The same for graphs of layers: all orders of branches at once."""
