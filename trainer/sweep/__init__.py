"""Many runs from one command line: `python train.py -m`."""
