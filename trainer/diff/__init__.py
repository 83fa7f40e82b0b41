"""Find where two runs diverge, from their files and from replays. Importing it does not import torch."""
