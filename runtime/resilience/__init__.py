"""Failures while a run trains: heartbeats, hangs, stragglers, membership, peer copies."""
