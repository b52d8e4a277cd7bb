"""Physical constants of a cluster, fitted to runs that were measured on it."""
