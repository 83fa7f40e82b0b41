"""`python -m trainer.faults.drill` between two hosts of two ranks each, with a link that can be cut.

    python -m benchmarks.drill_two_hosts [--strategies ddp,fsdp] [--comm native,ring] [--faults kill,cut]

Hosts are network namespaces, so this needs root. `fault.host=1` is cut off at the switch: packets vanish, and
no error tells of it.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.hosts import Host, hosts, torchrun
from trainer.faults import drill

FAULTS = (*drill.FAULTS, "cut")


def on(
    members: Sequence[Host], per_host: int, *options: str, conf: str = ""
) -> Callable[..., list[subprocess.Popen[Any]]]:
    """A launch by torchrun on each host, with `options` of torchrun's, the links mended before.

    Args:
        conf: more of --rdzv-conf.
    """

    def start(overrides: Sequence[str], environment: dict[str, str], folder: Path) -> list[Any]:
        launchers = []
        for host in members:
            host.link_up()
        for index, host in enumerate(members):
            command = [*torchrun(members, index, per_host, conf), *options, str(drill.PROGRAM), *overrides]
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


def cutting(case: drill.Case, members: Sequence[Host]) -> drill.Case:
    if case.fault != "cut":
        return case
    command = f"ip -n {members[1].switch} link set {members[1].port} down"
    return replace(case, overrides=(*case.overrides, "fault.host=1", f"fault.command='{command}'"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", default="ddp,fsdp")
    parser.add_argument("--comm", default="native,ring,hierarchical", help="for ddp")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--phase", default="forward")
    parser.add_argument("--timeout-s", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="drill-"))
    strategies, comms = arguments.strategies.split(","), arguments.comm.split(",")
    with hosts(2) as pair:
        todo = [
            cutting(case, pair)
            for case in drill.cases(strategies, comms, arguments.faults.split(","), arguments.phase)
        ]
        wrong = drill.drill(todo, on(pair, 2, "--max-restarts=1"), folder, arguments.timeout_s)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
