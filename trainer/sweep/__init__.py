"""Many runs from one command line: `python train.py -m`. A sweep knows only a run's command and folder."""
