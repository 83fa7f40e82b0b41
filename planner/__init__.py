"""Predictions of communication, step times and memory on other machines; not imported by trainer."""
