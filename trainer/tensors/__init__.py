"""Tensors as such: their bits, their shards, and what is nested around them."""
