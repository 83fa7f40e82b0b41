"""Count false alarms of train.verify_every.

    python -m benchmarks.verify_alarms [--only tv: hf:gpt2] [--steps 25] [--out FILE]

Trains each model of benchmarks/zoo.py, and small models with dropout and batch norm, on two ranks with one
chunk each, with DDP and FSDP. In each step, each rank recomputes the other rank's chunk. Models that
train.exact does not support are listed with the reason. Any alarm is false, unless the machine is defective.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import zoo, zoo_models
from tests.exact.matrix import MODELS
from tests.ranks import RankFailure, run_ranks
from tests.runs import settings
from trainer.errors import RunEndError, WrongResultError, first_line

_RANKS = 2
_WORDS = (
    *(
        f"train.exact={_RANKS}",
        "train.verify_every=1",
        "train.eval_every_epochs=0",
        "train.micro_batch_size=null",
    ),
    *(
        "checkpoint.every_steps=null",
        "checkpoint.every_epochs=null",
        "train.epochs=100000",
        "schedule=constant",
    ),
)


def _config(name: str, strategy: str, steps: int, folder: str) -> Any:
    words = (*_WORDS, f"strategy={strategy}", f"train.max_steps={steps}")
    if name in MODELS:
        return settings(*MODELS[name], *words, f"run_dir={folder}/{name.replace(':', '_')}-{strategy}")
    config = zoo.configured(name, strategy, Path(folder) / f"{name.replace(':', '_')}-{strategy}")
    config = dataclasses.replace(
        config,
        train=settings(*zoo.WORDS, *words).train,
        checkpoint=settings(*zoo.WORDS, *words).checkpoint,
    )
    config.data.dataset["micro_batches_of"] = 1
    return config


def verify_models(folder: str, steps: int, cases: list[tuple[str, str]]) -> list[tuple[int, str]]:
    """Return for each model and strategy the number of verifications of both ranks, and the error, if any."""
    from trainer.run import run

    found = []
    for name, strategy in cases:
        verifications, error = 0, ""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                verifications = _RANKS * run(_config(name, strategy, steps, folder))["steps"]
            except WrongResultError as alarm:
                error = f"ALARM: {alarm}"
            except (RunEndError, ImportError) as refusal:
                error = f"refused: {first_line(refusal)}"
        if dist.is_initialized():
            dist.destroy_process_group()
        found.append((verifications, error))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=["mlp", "norm", "resnet", "gpt", "tv:", "timm:", "hf:"])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    known = [*MODELS, *zoo_models.names()]
    rows: list[dict[str, Any]] = []
    for name in [name for name in known if name.startswith(tuple(options.only))]:
        cases = [(name, strategy) for strategy in ("ddp", "fsdp")]
        with tempfile.TemporaryDirectory() as folder:
            try:
                results = run_ranks(
                    verify_models, _RANKS, folder, options.steps, cases, init=False, timeout_s=600
                )[0]
            except RankFailure as failure:
                results = [(0, f"failed: {str(failure).splitlines()[-1]}")]
        for (_, strategy), (verifications, error) in zip(cases, results, strict=False):
            rows.append({"model": name, "strategy": strategy, "verifications": verifications, "error": error})
            print(name, strategy, verifications, error, flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    alarms = sum(row["error"].startswith("ALARM") for row in rows)
    print(f"{sum(row['verifications'] for row in rows):,} verifications, {alarms} false alarms")


if __name__ == "__main__":
    main()
