"""What looks for wrong results, in the first steps or at a border: an evaluation, a save, the end."""
