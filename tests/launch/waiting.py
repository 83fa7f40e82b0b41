"""A standby that loads nothing: `python -m tests.launch.waiting FD`. Begun, it writes what it was told to OUT."""

import json
import os
import socket
import sys
from pathlib import Path

from trainer.launch.fresh import die_with_parent
from trainer.launch.local_ranks import received_command_line

if __name__ == "__main__":
    die_with_parent()
    words = received_command_line(socket.socket(fileno=int(sys.argv[1])))
    if words is None:
        sys.exit(5)
    told = {"argv": words, "rank": os.environ["RANK"], "pid": os.getpid()}
    Path(f"{os.environ['OUT']}-{told['rank']}").write_text(json.dumps(told))
    sys.exit(int(words[-1]))
