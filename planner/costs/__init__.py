"""What a layout costs: seconds and bytes of layers, collectives, hosts."""
