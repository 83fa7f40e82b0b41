"""Datasets, and how each rank reads its samples."""
