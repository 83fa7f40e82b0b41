"""All-reduce algorithms as data, which can be divided into segments and checked without a network."""
