"""Atomic checkpoints and bit-exact resume."""
