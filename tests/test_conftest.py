"""Detection of processes that a test leaves behind."""

from __future__ import annotations

import subprocess

from tests import conftest


def test_an_orphaned_process_is_found() -> None:
    pids = conftest._pids()
    orphan = "sleep 1000 < /dev/null > /dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["setsid", "sh", "-c", orphan], stdout=subprocess.PIPE, check=True).stdout)
    try:
        assert conftest._processes(but=pids)[pid].split() == ["sleep", "1000"]
    finally:
        subprocess.run(["kill", "-9", str(pid)], check=True)
