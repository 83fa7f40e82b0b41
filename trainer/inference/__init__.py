"""A trained model at work: evaluation, predictions, text. Imports no torch."""
