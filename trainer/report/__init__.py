"""What is measured of a run: times, losses, FLOPs, hashes, statistics of weights; traces."""
