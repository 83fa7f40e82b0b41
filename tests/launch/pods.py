"""Pods of a JobSet, each a network namespace with a directory of its own, played with what is printed for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.hosts import Host
from tests.programs import Program, started
from tests.ranks import ROOT
from tests.runs import settings
from trainer.launch.kubernetes import job_set


def printed(*argv: str) -> dict[str, Any]:
    """The JobSet that `train.py launch=kubernetes ARGV` prints."""
    argv = ("launch=kubernetes", *argv)
    return job_set(settings(*argv), argv)


def container_of(job_set: dict[str, Any]) -> dict[str, Any]:
    job: dict[str, Any] = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return dict(container)


@contextlib.contextmanager
def pods(hosts: Sequence[Host], disks: Path, *argv: str) -> Iterator[list[Program]]:
    """Start the pods of a JobSet on `hosts`; their files are under `disks`, which nothing else has written.

    What Kubernetes would tell them comes from here: the index, and the address behind the name of the first.
    Their ranks are forked.
    """
    container = container_of(printed(f"launch.nodes={len(hosts)}", *argv))
    told = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    told |= {"PET_MASTER_ADDR": hosts[0].address, "PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as stack:
        programs = []
        for index, host in enumerate(hosts):
            disk = disks / f"pod{index}"
            disk.mkdir(parents=True)
            env = {**told, "PET_NODE_RANK": str(index), "PWD": str(disk)}
            command = (str(ROOT / "train.py"), *container["args"])
            programs.append(stack.enter_context(started(*command, env=env, cwd=disk, host=host, forks=True)))
        yield programs


def children(pid: int) -> list[int]:
    """The processes that `pid` has started and that live, by their number."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())
