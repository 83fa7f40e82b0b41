"""What runs a schedule on real tensors: shared memory, gloo, NCCL."""
