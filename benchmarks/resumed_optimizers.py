"""Check whether runs with third-party optimizers and schedules resume exactly, on a CPU.

    pip install --no-deps pytorch-optimizer torch-optimizer pytorch-ranger lion-pytorch prodigyopt \
        dadaptation schedulefree timm came-pytorch adabelief-pytorch bitsandbytes
    pip install transformers tabulate colorama
    python -m benchmarks.record resumed_optimizers python -m benchmarks.resumed_optimizers

A run of six steps saves after the third step, and a second process resumes there. Prints for each class
whether both runs end with the same bits, or an error message, and the warnings of both runs.
"""

import contextlib
import io
import logging
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import runs
from tests.ranks import run_ranks

COMMON = (
    *(
        "strategy=single",
        "model.hidden=[8]",
        "logger=jsonl",
        "train.max_steps=6",
        "train.global_batch_size=64",
    ),
    *("train.eval_every_epochs=0", "checkpoint.every_steps=3", "checkpoint.keep_last=9"),
)
STEP = 3
OWN = "benchmarks.resumed_optimizers."
SCHEDULES = "torch.optim.lr_scheduler."
OPTIMIZERS = {  # options by class
    OWN + "RowWiseAdagrad": "",
    "lion_pytorch.Lion": "",
    "prodigyopt.Prodigy": "lr=1",
    "dadaptation.DAdaptAdam": "lr=1",
    "dadaptation.DAdaptLion": "lr=1",
    "schedulefree.AdamWScheduleFree": "warmup_steps=2",
    "schedulefree.SGDScheduleFree": "",
    "came_pytorch.CAME": "",
    "adabelief_pytorch.AdaBelief": "print_change_log=false",
    "torch_optimizer.Lamb": "",
    "torch_optimizer.RAdam": "",
    "torch_optimizer.Shampoo": "",
    "torch_optimizer.SWATS": "",
    "pytorch_optimizer.SOAP": "",
    "pytorch_optimizer.Ranger21": "num_iterations=6",
    "pytorch_optimizer.AdEMAMix": "",
    "pytorch_optimizer.Muon": "",
    OWN + "lookahead": "",
    "timm.optim.Lars": "",
    "timm.optim.NAdamW": "",
    "timm.optim.Adafactor": "",
    "transformers.Adafactor": "relative_step=false",
    "bitsandbytes.optim.AdamW8bit": "",
}
LINEAR = f"{{_target_:{SCHEDULES}LinearLR,_partial_:true,total_iters:2}}"
EXPONENTIAL = f"{{_target_:{SCHEDULES}ExponentialLR,_partial_:true,gamma:0.9}}"
WARMUP = "num_warmup_steps=2 num_training_steps=auto"
SCHEDULE_OPTIONS = {
    "transformers.get_linear_schedule_with_warmup": WARMUP,
    "transformers.get_cosine_schedule_with_warmup": WARMUP,
    "transformers.get_polynomial_decay_schedule_with_warmup": WARMUP,
    "transformers.get_inverse_sqrt_schedule": "num_warmup_steps=2",
    "pytorch_optimizer.CosineAnnealingWarmupRestarts": "first_cycle_steps=4 max_lr=0.1 warmup_steps=2",
    "timm.scheduler.CosineLRScheduler": "t_initial=6",
    SCHEDULES + "SequentialLR": f"milestones=[2] schedulers=[{LINEAR},{EXPONENTIAL}]",
    SCHEDULES + "ChainedScheduler": f"schedulers=[{LINEAR},{EXPONENTIAL}]",
    SCHEDULES + "OneCycleLR": "max_lr=0.1 total_steps=auto",
}


class RowWiseAdagrad(torch.optim.Optimizer):
    """Row-wise Adagrad as in DLRM; an attribute records whether the state has been created."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.01, eps: float = 1e-10) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        self.momentum_initialized = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if not self.momentum_initialized:
                    self.state[p]["momentum"] = (
                        p.grad.square().flatten(1).mean(1) if p.ndim > 1 else p.grad**2
                    )
                else:
                    self.state[p]["momentum"] += (
                        p.grad.square().flatten(1).mean(1) if p.ndim > 1 else p.grad**2
                    )
                scale = self.state[p]["momentum"].sqrt() + group["eps"]
                p -= group["lr"] * p.grad / (scale[:, None] if p.ndim > 1 else scale)
        self.momentum_initialized = True


def lookahead(params: Iterable[Tensor], lr: float) -> Any:
    from torch_optimizer import Lookahead

    return Lookahead(torch.optim.SGD(params, lr, momentum=0.9), k=2)


def overrides() -> dict[str, tuple[str, ...]]:
    """Return the settings of each run, by the class under test."""
    found = {}
    for name, options in OPTIMIZERS.items():
        given = {"lr": "0.01"} | dict(option.split("=") for option in options.split())
        own = (f"{'' if key == 'lr' else '+'}optim.{key}={value}" for key, value in given.items())
        found[name] = ("optim=own", f"optim._target_={name}", "schedule=constant", *own)
    for name, options in SCHEDULE_OPTIONS.items():
        pairs = [part.partition("=") for part in options.split()]
        own = (f"+schedule.{key}={value}" for key, _, value in pairs)
        found[name] = ("schedule=own", f"schedule._target_={name}", *own)
    return found


def results(folder: Path, resumes: bool, only: list[str]) -> dict[str, tuple[str, list[str]]]:
    """Return, for each class, the hash of its run or the error message, and the warnings."""
    found = {}
    for number, (name, settings) in enumerate(overrides().items()):
        if only and not any(word in name for word in only):
            continue
        warnings: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record, warnings=warnings: warnings.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("trainer").addHandler(handler)
        first = folder / f"{number}_first"
        where = (f"run_dir={first}",)
        if resumes:
            saved = first / "checkpoints" / f"step_{STEP:08d}"
            where = (f"run_dir={folder / f'{number}_resumed'}", f"resume={saved}")
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                end = str(runs.train(*COMMON, *settings, *where)["param_sha256"])
        except Exception as error:
            end = f"{type(error).__name__}: {error}".splitlines()[0]
        logging.getLogger("trainer").removeHandler(handler)
        found[name] = end, warnings
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        uninterrupted, resumed = (
            run_ranks(results, 1, Path(name), resumes, sys.argv[1:], init=False, fresh=True, timeout_s=1800)[
                0
            ]
            for resumes in (False, True)
        )
    same = sum(end == resumed[name][0] and ":" not in end for name, (end, _) in uninterrupted.items())
    print(
        f"{same} of {len(OPTIMIZERS)} optimizers and {len(SCHEDULE_OPTIONS)} schedules end with the same bits"
    )
    for name, (end, warnings) in uninterrupted.items():
        again, more_warnings = resumed[name]
        words = (
            end
            if ":" in end
            else "same bits"
            if end == again
            else again
            if ":" in again
            else "DIFFERENT BITS"
        )
        distinct = dict.fromkeys(warnings + more_warnings)
        print(f"{name.removeprefix(OWN)}: {words}. {'; '.join(distinct)}".rstrip())


if __name__ == "__main__":
    main()
