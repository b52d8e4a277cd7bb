"""The bare partition problem: chains cut into stages, exactly, with proof."""
