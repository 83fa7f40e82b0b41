"""What a model holds: its names, its trained parameters, adapters and frozen statistics."""
