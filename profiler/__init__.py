"""profiler measures: layers, links and the machine, as the runtime will meet them."""
