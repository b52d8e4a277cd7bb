"""Costs of a layout: seconds and bytes of layers, collectives, hosts."""
