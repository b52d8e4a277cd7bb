"""runtime acts: it executes a Plan with torch.distributed."""
