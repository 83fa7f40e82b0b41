"""Datasets, and how their samples come to each rank."""
