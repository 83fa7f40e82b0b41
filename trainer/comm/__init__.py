"""Communication in the open: all-reduce algorithms, what runs them, what they cost, the network below."""
