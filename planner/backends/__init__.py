"""What training frameworks do with a model: their accounting rules, and runs priced by them."""
