"""Models: families of transformers, a reference decoder, pretrained weights, initialization."""
