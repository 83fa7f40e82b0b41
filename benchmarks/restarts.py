"""Kill ranks at random steps under `torchrun --max-restarts`, and compare with an uninterrupted run.

Trains the MLP on the digits with a checkpoint every 20 steps, once uninterrupted and then repeatedly with up
to three kills per run, each of a random rank at a random step. Prints the time until the next step for each
kill, and for each run whether its hash is the expected one, and whether TensorBoard and metrics.jsonl contain
every step exactly once. With --hosts 2, hosts are network namespaces, which requires root. --lose removes one
host permanently, under --nnodes=1:2. With --elastic 5, all ranks of five runs with train.exact=8 are killed,
and the runs are restarted with random numbers of ranks and strategies. benchmarks/lost_steps.py injects many
more kinds of failures, and counts lost steps.

    python -m benchmarks.restarts [--kills 10] [--hosts 2] [--lose kill|cut] [--elastic 5]
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks import drilled_run
from benchmarks.drilled_run import on_hosts
from tests.hosts import Host, hosts

STEPS, SAVED, RESTARTS = 240, 20, 3
_DEADLINE_S = 240.0  # for a whole run; pytest stops a test after 300 s without output


def overrides(run_dir: Path, steps: int, timeout_s: float, *more: str) -> list[str]:
    return [
        *("strategy=ddp", f"train.max_steps={steps}", "train.log_every_steps=1"),
        *(f"checkpoint.every_steps={SAVED}", f"distributed.timeout_s={timeout_s}"),
        *("resume=auto", f"run_dir={run_dir}", *more),
    ]


def run(
    start: drilled_run.Start,
    folder: Path,
    kills: Sequence[int],
    draw: random.Random,
    *,
    steps: int = STEPS,
    timeout_s: float = 10.0,
    more: Sequence[str] = (),
    kill: Callable[[], str] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Run, and kill a rank at each step of `kills`; return the result and a line for each kill.

    Args:
        kill: called instead of killing a rank; returns a description.
    """
    run_dir, mark = folder / "run", f"{os.getpid()}-{folder.parent.name}-{folder.name}"
    folder.mkdir(parents=True)
    environment = {drilled_run.MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    rows = []
    deadline = time.monotonic() + _DEADLINE_S
    launchers = start(overrides(run_dir, steps, timeout_s, *more), environment, folder)
    with drilled_run.stopping(launchers):
        _wait(launchers, folder, deadline, lambda: True)
        for number, step in enumerate(kills):
            _wait(launchers, folder, deadline, lambda n=number, s=step: _step(run_dir, n) >= s)  # type: ignore[misc]
            ranks = sorted(drilled_run.ranks_of(mark))  # of this attempt; earlier attempts have ended
            at, begin = _step(run_dir, number), time.monotonic()
            if kill is None:
                pid = draw.choice(ranks)
                words = f"rank {_rank(pid)} killed"
                os.kill(pid, signal.SIGKILL)
            else:
                words = kill()
            _wait(launchers, folder, deadline, lambda n=number: _step(run_dir, n + 1) > 0)  # type: ignore[misc]
            rows.append(f"{words} at step {at}: next step after {time.monotonic() - begin:.1f} s")
        _wait(launchers, folder, deadline, lambda: (run_dir / "result.json").exists(), may_end=True)
        # torchrun may wait 30 s if a rank gets a signal just before its end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            for launcher in launchers:
                launcher.wait(5)
    if not (run_dir / "result.json").exists():
        raise RuntimeError(f"the run did not finish\n{_outputs(folder)}")
    return json.loads((run_dir / "result.json").read_text()), rows


def problems_of_logs(run_dir: Path, steps: int) -> list[str]:
    """Return descriptions of missing, repeated or unordered steps in TensorBoard and metrics.jsonl.

    A step that a survivor saved may be missing, because rank 0 may have died between update and logging.
    """
    saved_on_failure = set(map(int, re.findall(r"resumed from .* at step (\d+)", _messages(run_dir))))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = [line["step"] for line in lines if "train/loss" in line]
    expected = [step for step in range(1, steps + 1) if step in logged or step not in saved_on_failure]
    found = []
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    for tag in ("train/loss", "train/lr", "usage/samples_per_second"):
        if (seen := [event.step for event in events.Scalars(tag)]) != expected:
            found.append(f"{tag}: {_difference(seen, expected)}")
    if logged != expected:
        found.append(f"metrics.jsonl: {_difference(logged, expected)}")
    return found


def _messages(run_dir: Path) -> str:
    return (run_dir / "train.log").read_text()


def _difference(seen: Sequence[int], expected: Sequence[int]) -> str:
    missing = sorted(set(expected) - set(seen))
    twice = sorted({step for step in seen if seen.count(step) > 1})
    return f"missing {missing}, more than once {twice}"


def _wait(
    launchers: list[subprocess.Popen[Any]],
    folder: Path,
    deadline: float,
    until: Callable[[], bool],
    may_end: bool = False,
) -> None:
    while not until():
        gone = all(launcher.poll() is not None for launcher in launchers)
        if gone and may_end:
            return
        if gone or time.monotonic() > deadline:
            raise RuntimeError(f"{'all launchers have ended' if gone else 'timeout'}\n{_outputs(folder)}")
        time.sleep(0.02)


def _outputs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-6000:] for path in sorted(folder.glob("output*")))


def _step(run_dir: Path, resumptions: int) -> int:
    """Return the last step that was logged after `resumptions` resumes, or 0."""
    with contextlib.suppress(OSError):
        parts = (run_dir / "train.log").read_text().split("resumed from")
        if len(parts) == resumptions + 1 and (logged := re.findall(r"step (\d+)/", parts[-1])):
            return int(logged[-1])
    return 0


def _rank(pid: int) -> int:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return int(next(entry for entry in entries if entry.startswith(b"RANK="))[5:])


def steps_to_kill_at(draw: random.Random, count: int) -> list[int]:
    """Return random steps in order, after the first checkpoint."""
    return sorted(draw.sample(range(SAVED + 2, STEPS - 5), count))


def kill_ranks(start: drilled_run.Start, folder: Path, num_kills: int, seed: int) -> bool:
    draw = random.Random(seed)
    expected, _ = run(start, folder / "uninterrupted", [], draw)
    print(f"uninterrupted: {expected['param_sha256'][:12]}, {expected['steps']} steps", flush=True)
    is_right, left = True, num_kills
    while left:
        kills = steps_to_kill_at(draw, min(RESTARTS, left))
        left -= len(kills)
        run_folder = folder / f"left{left}"
        result, rows = run(start, run_folder, kills, draw)
        equal = result["param_sha256"] == expected["param_sha256"]
        problems = problems_of_logs(run_folder / "run", STEPS)
        is_right = is_right and equal and not problems
        print("\n".join(f"  {row}" for row in rows))
        print(
            f"finished, hash {'equal' if equal else 'NOT EQUAL'}, {problems or 'logs complete'}", flush=True
        )
    return is_right


def lose(
    pair: Sequence[Host], folder: Path, how: str, steps: int = STEPS
) -> tuple[dict[str, Any], list[str]]:
    """Run with two hosts of two ranks under --nnodes=1:2, and lose the second host after some steps."""

    def lose_host() -> str:
        (pair[1].kill_all if how == "kill" else pair[1].link_down)()
        return {"kill": "host 1 killed", "cut": "host 1 disconnected"}[how]

    # By default, torchrun detects a lost host after 15 s and waits 30 s for it. last_call_timeout must exceed
    # the start-up time of the second host, or the first one would train alone.
    conf = "last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=4"
    start = on_hosts(pair, 2, f"--max-restarts={RESTARTS}", "--nnodes=1:2", conf=conf)
    return run(start, folder, [SAVED + 15], random.Random(0), steps=steps, timeout_s=6.0, kill=lose_host)


def elastic(
    start_on: Callable[[int], drilled_run.Start], folder: Path, num_runs: int, num_kills: int, seed: int
) -> bool:
    """Kill each run `num_kills` times, start it with random world sizes and strategies, and compare hashes.

    Args:
        start_on: returns a function that starts a run on the given number of ranks.
    """
    draw, hashes = random.Random(seed), []
    for number in range(num_runs + 1):  # the first run is uninterrupted
        here = folder / f"run{number}"
        here.mkdir()
        kills = steps_to_kill_at(draw, num_kills if number else 0)
        for attempt, until in enumerate([*kills, STEPS]):
            world, strategy = draw.choice((1, 2, 4, 8)), draw.choice(("ddp", "fsdp"))
            mark = f"{os.getpid()}-{folder.name}-{number}-{attempt}"
            environment = {drilled_run.MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            words = overrides(here / "run", STEPS, 30.0, "train.exact=8")
            words[0] = f"strategy={strategy}"
            launchers = start_on(world)(words, environment, here)
            deadline = time.monotonic() + _DEADLINE_S
            with drilled_run.stopping(launchers):
                if until == STEPS:
                    done = here / "run" / "result.json"
                    _wait(launchers, here, deadline, lambda done=done: done.exists(), may_end=True)  # type: ignore[misc]
                    continue
                _wait(
                    launchers, here, deadline, lambda at=here, n=attempt, s=until: _step(at / "run", n) >= s
                )  # type: ignore[misc]
                for pid in drilled_run.ranks_of(mark):
                    os.kill(pid, signal.SIGKILL)
            print(f"  {world} x {strategy} killed at step {until}", flush=True)
        hashes.append(json.loads((here / "run" / "result.json").read_text())["param_sha256"])
        same = (
            "uninterrupted" if not number else "hash equal" if hashes[-1] == hashes[0] else "hash NOT EQUAL"
        )
        print(f"finished on {world} x {strategy}: {same}", flush=True)
    return len(set(hashes)) == 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--hosts", type=int, default=1, choices=(1, 2))
    parser.add_argument("--lose", choices=("kill", "cut"), help="how the second host is lost")
    parser.add_argument(
        "--elastic", type=int, default=0, metavar="N", help="number of runs, each with --kills kills"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with drilled_run.exit_on_signals(), contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="restarts-")))
        pair = stack.enter_context(hosts(2)) if arguments.hosts == 2 or arguments.lose else None

        def start_on(world: int, restarts: int = RESTARTS) -> drilled_run.Start:
            if pair is None or world == 1:
                return drilled_run.torchrun(world, f"--max-restarts={restarts}")
            return on_hosts(pair, world // 2, f"--max-restarts={restarts}")

        if arguments.elastic:
            start_without_restarts = partial(start_on, restarts=0)
            done = elastic(start_without_restarts, folder, arguments.elastic, arguments.kills, arguments.seed)
        elif pair is None or arguments.lose is None:
            done = kill_ranks(start_on(2 * arguments.hosts), folder, arguments.kills, arguments.seed)
        else:
            result, rows = lose(pair, folder / "lost", arguments.lose)
            problems = problems_of_logs(folder / "lost" / "run", STEPS)
            print(f"{rows[0]}; finished with {result['world_size']} ranks, {result['steps']} steps,")
            print(f"{result['samples_seen']} samples, {problems or 'logs complete'}")
            done = not problems
        sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
