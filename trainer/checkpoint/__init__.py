"""Checkpoints that cannot be torn, and a resume that is exact to the bit."""
