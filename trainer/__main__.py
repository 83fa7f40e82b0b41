"""`python -m trainer`: the same as train.py."""

from ringmaster import main

if __name__ == "__main__":
    main()
