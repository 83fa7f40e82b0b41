"""Construction of data, task and model from the settings, for training, evaluation and prediction."""
