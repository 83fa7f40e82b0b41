"""Train unusual modules with each strategy, and compare with a resumed run.

Each module of benchmarks/module_kinds makes six steps in a single process, and on two ranks with DDP, FSDP
and parameter servers. Another run resumes from the checkpoint of step 3. It must end with the same bits, or
the run must be refused: before its first step, or after it if a forward pass creates state that cannot be
saved. Results:

    equal      the resumed run ended with the same bits
    refused    the run was refused, with a message for users
    warned     the bits differ, after a warning about state that checkpoints do not contain
    WRONG      anything else; the exit status is then 1
    DIFFERENT  strategies that make the same steps on two ranks ended with different bits

    python -m benchmarks.modules [--only Tied Lstm] [--strategies fsdp] [--out FOLDER]
"""

import argparse
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.module_kinds import KINDS
from benchmarks.visits import Answers, Table, read, visit_each
from tests.runs import job_as, settings

STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2, "parameter_server": 2}
STEPS, STOPPED_AT = 6, 3
WORDS = (
    "model._target_=benchmarks.module_kinds.build",
    "~model.input_shape",
    "~model.num_classes",
    "~model.hidden",
    "data.dataset._target_=tests.user_parts.Stripes",
    "optim.lr=0.1",
    "schedule=constant",
    "train.global_batch_size=16",
    f"train.max_steps={STEPS}",
    "train.log_every_steps=2",
    f"checkpoint.every_steps={STOPPED_AT}",
    "checkpoint.every_epochs=null",
    "distributed.timeout_s=60",
    "logger=jsonl",
)


def visit(strategy: str, resume: bool, folder: Path, answers: Answers, kind: str) -> None:
    from trainer.errors import UserError
    from trainer.loop import fit
    from trainer.report.run_hash import parameters_sha256

    words = ["strategy.servers=all"] * (strategy == "parameter_server")
    source = saved_by(folder, kind)
    run_dir = folder / (f"{kind}-resumed" if resume else kind)
    words += [f"run_dir={run_dir}", f"resume={source if resume else 'null'}"]

    def trained() -> str:
        with (
            unsaved_state_warnings() as warnings,
            job_as(settings(f"strategy={strategy}", *WORDS, f"+model.kind={kind}", *words)) as context,
        ):
            try:
                fit(context)
            except UserError as error:
                if (step := context.state.progress.step) > 1:
                    raise RuntimeError(f"refused after step {step}: {error}") from error
                raise
            if warnings:
                answers.give("warned", warnings[0])
            return parameters_sha256(context.state.model)

    question = "resumed" if resume else "trained"
    sha = answers.result_of(question, trained)
    if int(os.environ["RANK"]) == 0:
        answers.give(question, sha)


def saved_by(folder: Path, kind: str) -> Path:
    """Return the checkpoint to resume from, which a refused run does not have."""
    return folder / kind / "checkpoints" / f"step_{STOPPED_AT:08}"


@contextmanager
def unsaved_state_warnings() -> Iterator[list[str]]:
    """Collect this rank's warnings about state that checkpoints do not contain."""
    warnings: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("trainer.guards.unsaved")
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield warnings
    finally:
        log.removeHandler(handler)


def result_of_kind(row: dict[str, str]) -> str:
    trained, resumed = row.get("trained", "WRONG: no answer"), row.get("resumed", "")
    if trained.startswith(("refused", "WRONG")):
        return trained
    if resumed.startswith("refused"):
        return f"WRONG: resume {resumed}"
    if resumed.startswith("WRONG"):
        return resumed
    if trained == resumed:
        return f"equal {trained[:8]}"
    return f"warned: {row['warned']}" if "warned" in row else "WRONG: different bits after a resume"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(KINDS), choices=KINDS, metavar="KIND")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--out", type=Path, help="folder for the results")
    arguments = parser.parse_args()
    found: dict[str, Table] = {}
    with tempfile.TemporaryDirectory(prefix="modules-") as scratch:
        for strategy in arguments.strategies:
            folder = (arguments.out or Path(scratch)).resolve() / strategy
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for resume in (False, True):
                test = partial(visit, strategy, resume, folder)
                kinds = [kind for kind in arguments.only if not resume or saved_by(folder, kind).exists()]
                for kind in visit_each(test, STRATEGIES[strategy], kinds, folder / f"answers{resume:d}"):
                    row = read(folder / f"answers{resume:d}").get(kind, {})
                    print(f"{strategy:17}{kind:22}", row, flush=True)
            found[strategy] = {
                kind: read(folder / "answers0").get(kind, {}) | read(folder / "answers1").get(kind, {})
                for kind in arguments.only
            }
    counts: Counter[str] = Counter()
    print()
    for kind in arguments.only:
        results = {strategy: result_of_kind(table[kind]) for strategy, table in found.items()}
        counts.update(each.split()[0].rstrip(":") for each in results.values())
        of_two = {v for s, v in results.items() if STRATEGIES[s] == 2 and v.startswith("equal")}
        print(f"{kind:22}{'  DIFFERENT' * (len(of_two) > 1)}")
        for strategy, each in results.items():
            print(f"    {strategy:17}{each}")
    print("  ".join(f"{word} {count}" for word, count in sorted(counts.items())))
    sys.exit("WRONG" in counts)


if __name__ == "__main__":
    main()
