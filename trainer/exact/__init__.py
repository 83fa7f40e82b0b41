"""The same bits at any world size and strategy: `train.exact=L` cuts a step into L fixed chunks."""
