"""Measurements of a run: times, losses, FLOPs, hashes, weight statistics and traces."""
