"""Many runs from one command line: `python train.py -m`. Sees a run as a command and a directory, no more."""
