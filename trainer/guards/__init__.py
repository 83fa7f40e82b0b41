"""Checks for wrong results, and a snapshot of the state to save after a failure."""
