"""What a framework executes: the runtime's own list, the rules of other frameworks."""
