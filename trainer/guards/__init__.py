"""What looks for wrong results at a border (evaluation, save, end), or keeps copies for a failure."""
