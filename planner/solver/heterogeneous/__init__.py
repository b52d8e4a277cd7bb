"""The same for devices that differ: their order along the pipeline, shares of replicas."""
