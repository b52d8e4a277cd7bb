"""From what a user asks to the fastest plan: configurations, bounds, best-first search, proof."""
