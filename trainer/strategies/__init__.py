"""Strategies: how a model is distributed over processes and devices."""
