"""One run: its folder, report, metrics, telemetry, node ranks, rendezvous, signals."""
