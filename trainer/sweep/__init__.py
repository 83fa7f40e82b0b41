"""Many runs from one command line: `python train.py -m`. Knows of a run only its command and directory."""
