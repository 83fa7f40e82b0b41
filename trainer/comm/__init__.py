"""All-reduce algorithms, their execution and timeline; parameter servers; a check of the network."""
