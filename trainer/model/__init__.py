"""Access to a model: names of parameters and buffers, trainable parameters, adapters, frozen statistics."""
