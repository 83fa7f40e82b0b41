"""Bit-identical training at any world size: `train.exact=L` divides each step into L fixed chunks."""
