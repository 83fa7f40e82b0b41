"""Updates of a state without a run."""

from types import SimpleNamespace
from typing import Any

import torch

from tests.runs import settings
from trainer.guards.failure_snapshot import Snapshot
from trainer.report.weight_statistics import WeightStatistics
from trainer.state.progress import Update
from trainer.state.train_state import TrainState
from trainer.strategies.base import ComputeOptions, Strategy
from trainer.update import apply_update


def run_of(state: TrainState, device: str = "cpu") -> Any:
    """Return the parts of a one-process run that `apply_update` uses."""
    there = torch.device(device)
    ranks: Any = SimpleNamespace(
        rank=0, world_size=1, is_main=True, device=there, describe=lambda rank: "here"
    )
    train = settings("train.global_batch_size=1", "train.log_every_steps=null").train
    return SimpleNamespace(
        ranks=ranks,
        state=state,
        task=None,
        strategy=Strategy(there, ComputeOptions()),
        config=SimpleNamespace(train=train),
        plan=SimpleNamespace(logs=lambda step: False),
        data=SimpleNamespace(train_loader=SimpleNamespace(not_finite=lambda *begin: None)),
        vote=SimpleNamespace(result=lambda: SimpleNamespace(data_left=True)),
        report=SimpleNamespace(
            weight_statistics=WeightStatistics(state.model, ranks, None),
            meter=SimpleNamespace(record_steps=list),
        ),
        guards=SimpleNamespace(snapshot=Snapshot(), kept_buffers=None),
    )


def update(run: Any, step: int = 1) -> Update:
    """Update the parameters of `run` from their gradients."""
    run.state.attach_gradients()
    return apply_update(run, step, run.state.trainable.gradient_norm(), ())
