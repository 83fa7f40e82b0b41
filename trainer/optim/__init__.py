"""Optimizers, parameters in groups, and schedules."""
