"""Training with the same bits at any world size: `train.exact=L` divides each step into L fixed chunks."""
