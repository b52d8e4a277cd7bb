"""Optimizers over shards, gradients, comparison of replicas, averages of weights."""
