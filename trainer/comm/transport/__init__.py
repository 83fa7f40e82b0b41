"""Runs schedules on real tensors: over shared memory, gloo or NCCL."""
