"""How the processes of a run start, and how they end. Does not import torch."""
