"""All-reduce algorithms as data: built, cut into segments, checked without a network."""
