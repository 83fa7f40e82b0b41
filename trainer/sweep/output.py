"""What a sweep prints."""

import os
import sys


def say(text: str) -> None:
    """Print `text`. After the reader of a pipe has gone, as with `| head`, the sweep goes on silently."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
