"""All-reduce algorithms, the executors that run them, their costs, and checks of the network."""
