"""Predictions of communication, step times and memory on other machines; trainer does not import this."""
