"""The ranks of a run: their process group, and what they gather, sum and seed in common."""
