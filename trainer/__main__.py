"""`python -m trainer`: the same command line as `python train.py`."""

from ringmaster import main

if __name__ == "__main__":
    main()
