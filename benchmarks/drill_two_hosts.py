"""`python -m trainer.faults.drill` between two hosts of two ranks each, with a link that can be cut.

    python -m benchmarks.drill_two_hosts [--strategies ddp,fsdp] [--comm native,ring] [--faults kill,cut]

Hosts are network namespaces, so this needs root. `fault.host=1` is cut off at the switch: packets vanish
without an error.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.hosts import Host, hosts, torchrun
from trainer.faults import drill
from trainer.faults.injection.drilled_run import PROGRAM, Case, by_the_door

FAULTS = (*drill.FAULTS, "cut")


def on(
    members: Sequence[Host], per_host: int, *options: str, conf: str = ""
) -> Callable[..., list[subprocess.Popen[Any]]]:
    """Launch by torchrun on each host, with `options` of torchrun, after the links are restored.

    Args:
        conf: further --rdzv-conf.
    """

    def start(overrides: Sequence[str], environment: dict[str, str], folder: Path) -> list[Any]:
        launchers = []
        for host in members:
            host.link_up()
        for index, host in enumerate(members):
            command = [*torchrun(members, index, per_host, conf), *options, str(PROGRAM), *overrides]
            with (folder / f"output{index}").open("ab") as file:
                launchers.append(
                    host.popen(
                        command,
                        {**environment, "GLOO_SOCKET_IFNAME": host.interface},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        return launchers

    return start


def cutting(case: Case, members: Sequence[Host]) -> Case:
    if case.fault != "cut":
        return case
    command = f"ip -n {members[1].switch} link set {members[1].port} down"
    return replace(case, overrides=(*case.overrides, "fault.host=1", f"fault.command='{command}'"))


def main() -> None:
    arguments = drill.parser(__doc__, FAULTS).parse_args()
    with by_the_door(), hosts(2) as pair:
        todo = drill.cases(arguments.strategies, arguments.comm, arguments.faults, arguments.phase)
        todo = [cutting(case, pair) for case in todo]
        status = drill.main(todo, on(pair, 2, "--max-restarts=1"), arguments)
    sys.exit(status)


if __name__ == "__main__":
    main()
