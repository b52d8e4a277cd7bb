"""Plans in the words of other frameworks."""
