"""Use of trained models: evaluation, prediction, text generation. Importing it does not import torch."""
