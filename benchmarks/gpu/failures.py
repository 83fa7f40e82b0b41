"""Failures of ranks that share a GPU and communicate with NCCL; see benchmarks.drill."""

import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.drilled_run import Case, Outcome, attempt, torchrun
from benchmarks.gpu.day import Day, Row

_TIMEOUT_S = 15.0
_RAS_PORT = 28028  # NCCL's default


def drill(day: Day) -> Iterator[Row]:
    cases = [Case("ddp", "native", kind) for kind in ("kill", "raise", "hang", "nan")]
    cases += [Case("ddp", "ring", kind) for kind in ("kill", "hang")]
    return _drill(day, day.size(cases, cases[:1]))


def all_reduce(day: Day) -> Iterator[Row]:
    """Inject failures while the other rank waits in the all-reduce of the first bucket."""
    cases = [Case("ddp", "ring", kind, "all_reduce") for kind in ("kill", "hang")]
    return _drill(day, day.size(cases, cases[:1]), no_step_lost=True)


def recorder(day: Day) -> Iterator[Row]:
    """Check what torch's flight recorder and NCCL's RAS report about a rank that hangs."""
    stop, answers = threading.Event(), [""]
    watcher = threading.Thread(target=_ask_ras, args=(stop, answers), daemon=True)
    watcher.start()
    with tempfile.TemporaryDirectory() as name:
        case = Case("ddp", "native", "hang")
        outcome = _attempt(case, Path(name, "case"), {"TORCH_FR_BUFFER_SIZE": "200"})
        files = sorted(path.name for path in Path(name, "case/run/stacks").glob("*.collectives.json"))
    stop.set()
    watcher.join()
    (day.out / "ras.txt").write_text(answers[0])
    named = outcome.report is not None and outcome.report.get("rank") == case.rank
    note = f"{', '.join(files) or 'no file'}; failure.json names rank {(outcome.report or {}).get('rank')}"
    yield Row("flight recorder", len(files), "files", "at least one", named and bool(files), note)
    answered = bool(answers[0]) if day.on_gpu else None
    yield Row("RAS", len(answers[0]), "characters", "an answer", answered, answers[0][:300])


def _ask_ras(stop: threading.Event, answers: list[str]) -> None:
    """Query NCCL's RAS thread on this host, and keep the longest answer."""
    while not stop.wait(1.0):
        with contextlib.suppress(OSError), socket.create_connection(("localhost", _RAS_PORT), 1) as ras:
            ras.settimeout(3)
            ras.sendall(b"verbose status\n")
            found = b""
            with contextlib.suppress(OSError):
                while more := ras.recv(65536):
                    found += more
            answers[0] = max(answers[0], found.decode(errors="replace"), key=len)


def _drill(day: Day, cases: Sequence[Case], no_step_lost: bool = False) -> Iterator[Row]:
    for strategy, comm in dict.fromkeys((case.strategy, case.comm) for case in cases):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            uninterrupted = _attempt(Case(strategy, comm, "none"), folder / "none")
            if uninterrupted.sha256 is None:
                note = uninterrupted.outputs[0][-2000:]
                yield Row(f"{strategy} {comm}, uninterrupted", None, bar="trains", ok=False, note=note)
                continue
            for case in (case for case in cases if (case.strategy, case.comm) == (strategy, comm)):
                outcome = _attempt(case, folder / case.failure)
                problems = outcome.problems(case, uninterrupted.sha256, _TIMEOUT_S)
                if no_step_lost and outcome.lost != 0:
                    problems.append(f"{outcome.lost} steps lost")
                what = f"{case.name}, {case.failure} in {case.phase}"
                bar = "reported, same model" + ", step saved" * no_step_lost
                note = "; ".join(problems) or f"reported after {outcome.report_s or 0:.1f} s"
                yield Row(what, outcome.end_s, "s to the end", bar, not problems, note)


def _attempt(case: Case, folder: Path, variables: dict[str, str] | None = None) -> Outcome:
    launch = torchrun(2)
    return attempt(
        case, lambda words, env, at: launch(words, env | (variables or {}), at), folder, _TIMEOUT_S
    )
