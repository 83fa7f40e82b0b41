"""Build data, task and model from the settings, for training, evaluation and prediction."""
