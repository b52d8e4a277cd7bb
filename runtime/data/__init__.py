"""Training data: corpus, packing, chat templates, loader, sample digests."""
