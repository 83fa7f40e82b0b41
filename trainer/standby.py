"""A rank of launch=local started before it is needed: `python -m trainer.standby FD`, by its launcher alone.

It imports what any run imports, and waits: a restart then takes no seconds for that. The user's modules are
not among them: they are imported when the rank begins, as edited by then.
"""

import socket
import sys
from importlib import import_module

import ringmaster
from trainer.cli import loaded_run
from trainer.launch.fresh import die_with_parent, extend_path, program
from trainer.launch.local_ranks import received_command_line

_OFTEN_USED = ("trainer.strategies.ddp", "trainer.loggers.tensorboard")  # imported by the settings


def main() -> None:
    die_with_parent()
    extend_path()
    loaded_run()
    for module in _OFTEN_USED:
        import_module(module)
    argv = received_command_line(socket.socket(fileno=int(sys.argv[1])))
    if argv is not None:
        sys.argv = [program()[-1], *argv]
        ringmaster.main()


if __name__ == "__main__":
    main()
