"""What happened in a step: make the steps of a run again. Does not import torch."""
