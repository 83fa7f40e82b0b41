"""Run a benchmark, and record its output: python -m benchmarks.record NAME COMMAND...

Writes the command, its output, the machine, its load before the run, and the date to
benchmarks/results/NAME.json. The documentation takes numbers from these files, and tests/test_docs.py
compares them.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    name, *command = sys.argv[1:]
    load = os.getloadavg()[0]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    if done.returncode:
        sys.exit(done.returncode)
    found = {
        "command": shlex.join(["python", *command[1:]] if command[0] == sys.executable else command),
        "date": str(date.today()),
        "machine": {"cores": os.cpu_count(), "processor": _processor(), "load_before": round(load, 1)},
        "torch": version("torch"),
        "output": done.stdout.splitlines(),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
