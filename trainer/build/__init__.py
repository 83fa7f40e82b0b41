"""Builds data, task and model from the settings, in the same way for training and after it."""
