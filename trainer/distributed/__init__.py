"""The ranks of a run: their process group, their random seeds, and what they gather and sum."""
