"""Dry runs of a step and an evaluation before the first step, to find mistakes early."""
