"""Ringmaster: a distributed training harness for PyTorch that you can read in one sitting."""
