"""All-reduce algorithms as data: made, cut into segments, proved without a network, counted."""
