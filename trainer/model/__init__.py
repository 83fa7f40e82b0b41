"""Models: names of parameters and buffers, trainable parameters, adapters and frozen statistics."""
