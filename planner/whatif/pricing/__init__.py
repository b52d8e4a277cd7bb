"""Money and availability: prices, financing, goodput, transfers, offers, queues."""
