"""Checks for wrong results, made at evaluations and saves, and copies of the state for failures."""
