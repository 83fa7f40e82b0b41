"""All-reduce algorithms, their execution and timeline, parameter servers, and a check of the network."""
