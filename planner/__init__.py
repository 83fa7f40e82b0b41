"""Predicts communication, steps and memory on machines that are not there; trainer never imports it."""
