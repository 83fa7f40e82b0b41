"""Uses of a trained model: evaluation, predictions, text. Does not import torch."""
