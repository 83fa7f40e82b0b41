"""Replay steps of a run and record everything that they compute; `trainer.diff` starts this for each run.

Each rank writes OUT/RANK.pt with the entries of the traced steps. Rank 0 also writes OUT/replay.json.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.context import Run
from trainer.distributed.agreement import gather_objects
from trainer.distributed.gather_shards import gather_shards_to_rank0
from trainer.errors import NonFiniteError
from trainer.files.writing import atomic_file
from trainer.inference.command import arguments, start
from trainer.model.plain_names import buffer_locations, plain_name
from trainer.replay.non_finite_watch import ObservedTransfer
from trainer.replay.replayed import replayed
from trainer.replay.report import why_different
from trainer.report.weight_statistics import WeightStatistics
from trainer.run_dir.steps_file import read_steps
from trainer.tensors.bits import bit_hashes
from trainer.tensors.local_shard import is_dtensor, to_local
from trainer.tensors.nested import leaves

_MOST_BYTES = 4 << 30  # most bytes of tensors that a rank keeps per step; further ones are only hashed
# Options of the optimizer that do not change what it computes.
_HOW = {"params", "name", "initial_lr", "foreach", "fused", "capturable", "differentiable"}


class StepTrace(WeightStatistics):
    """The entries of one step, in the order in which they are computed.

    Hooks trace the model. The update is traced in place of `WeightStatistics`, where gradients are complete.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.state.model, run.ranks, histograms_every=None)
        progress, split = run.state.progress, run.data.split
        self.entries: list[dict[str, Any]] = []
        self._run, self._micro_batch = run, -1
        self._requests = run.data.train_loader.requests(progress.epoch, progress.samples_in_epoch)
        divided = split.micro_batches(progress.samples_in_epoch, run.strategy.replica)
        self._positions = [list(own) for _, (_, own) in zip(self._requests, divided, strict=False)]
        self._room, self._calls = _MOST_BYTES, dict[str, int]()

    @contextmanager
    def tracing(self) -> Iterator[Run]:
        """Within the context, trace the next step of the yielded run."""
        run = self._run
        self._add_state("before", "{} before the step")
        handles = []
        if not run.config.train.compile:  # hooks would change what torch.compile generates
            for name, module in run.state.model.named_modules():
                hook = partial(self._add_output, plain_name(name))
                handles.append(module.register_forward_hook(hook))
        to_device = ObservedTransfer(self._add_batch, run.data.to_device)
        try:
            yield replace(
                run,
                data=run.data._replace(to_device=to_device),
                report=run.report._replace(weight_statistics=self),
            )
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def around_update(self, step: int, examines: bool) -> Iterator[None]:
        """Record gradients, the optimizer's options and the update made within the context (a collective)."""
        own, optimizer = self._run.state.trainable.own, self._run.state.optimizer
        for name, parameter in reversed(own.items()):
            if parameter.grad is not None:
                gradient = self._run.state.trainable.as_rows(name, parameter.grad)
                self._add_whole("gradients", f"gradient of {name}", gradient)
        names = {parameter: name for name, parameter in own.items()}
        for group in optimizer.param_groups:
            for option in sorted(group.keys() - _HOW):
                for parameter in group["params"]:
                    self.add("optimizer", f"{option} of {names[parameter]}", text=str(group[option]))
        yield
        self._add_state("update", "update of {}")

    def add(self, kind: str, name: str, value: Tensor | None = None, **more: Any) -> None:
        """Add an entry. `value` is always hashed, and also kept if there is room."""
        entry = {"kind": kind, "name": name, **more}
        if value is not None:
            value = value.detach()
            entry["hash"] = f"{value.dtype} {tuple(value.shape)} {bit_hashes([(name, value)])[name]}"
            if value.nbytes <= self._room:
                self._room -= value.nbytes
                entry["value"] = value.to("cpu", copy=True)
        self.entries.append(entry)

    def _add_batch(self, batch: Any) -> None:
        self._micro_batch += 1
        self._calls = {}
        numbers = self._requests[self._micro_batch].numbers
        self._add_rows("samples", "samples", torch.tensor(list(numbers)))
        tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
        for number, tensor in enumerate(tensors):
            self._add_rows("batch", f"tensor {number + 1} of {len(tensors)} in the batch", tensor)

    def _add_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        call = self._calls[name] = self._calls.get(name, 0) + 1
        where = (name or "the model") + f", call {call}" * (call > 1)
        tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
        for number, value in enumerate(tensors):
            own = f"{where}, tensor {number + 1} of {len(tensors)}" if len(tensors) > 1 else where
            self._add_rows("outputs", f"output of {own}", value)
            if value.requires_grad and torch.is_grad_enabled():
                value.register_hook(partial(self._add_rows, "backward", f"gradient of the output of {own}"))

    def _add_rows(self, kind: str, name: str, value: Tensor) -> None:
        """Add a tensor that may have a row for each sample of the micro-batch."""
        if value.layout == torch.strided:
            part, numbers = [self._ranks.rank, self._micro_batch], self._requests[self._micro_batch].numbers
            rows = {"positions": self._positions[self._micro_batch], "samples": list(numbers)}
            self.add(kind, name, to_local(value), part=part, **rows)

    def _add_state(self, kind: str, name: str) -> None:
        state = self._run.state
        for own_name, tensor in self._run.strategy.replicated(state):
            parameter = own_name.rpartition(" of ")[2]
            if parameter != own_name and not is_dtensor(tensor):  # a shard of the optimizer's state
                tensor = state.trainable.as_rows(parameter, tensor)
            self._add_whole(kind, name.format(own_name), tensor)
        for own_name, (module, attribute) in buffer_locations(state.model).items():
            self._add_whole(kind, name.format(own_name), getattr(module, attribute))

    def _add_whole(self, kind: str, name: str, tensor: Tensor) -> None:
        """Add a tensor that may be sharded, on rank 0 (a collective)."""
        if shards := list(gather_shards_to_rank0(tensor)):
            self.add(kind, name, torch.cat(shards) if len(shards) > 1 else shards[0])


def trace(run_dir: Path, first: int, steps: Sequence[int], start: Path | None, out: Path) -> None:
    """Run the steps from `first` to the last of `steps`, and trace `steps` (a collective)."""
    hashes, traces, error = dict[int, list[str]](), dict[int, list[dict[str, Any]]](), None
    with replayed(run_dir, first, start=start) as made:
        run = made.run
        last = min(steps[-1], run.plan.total_steps)
        for step in range(first, last + 1):
            hashes[step - 1] = _state_hashes(run)
            if step not in steps:
                made.epochs.step()
                made.use_evaluation()
                continue
            made.batches.ahead()  # does the dry run before the hooks are added
            of_step = StepTrace(run)
            with of_step.tracing() as made.epochs.run:
                try:
                    made.epochs.step()
                except NonFiniteError as raised:
                    error = str(raised)
            made.epochs.run = run
            run.report.meter.record_steps()
            record = read_steps(Path(run.config.run_dir or "")).get(step)
            if record is not None:  # the mean over all ranks
                of_step.add("loss", "loss", torch.tensor(record.loss, dtype=torch.float64))
            traces[step] = of_step.entries
            if error is not None:
                break
            made.use_evaluation()
        recorded, mismatches = made.compared()
        torch.save(traces, out / f"{run.ranks.rank}.pt")
        facts = {
            "start": None if made.checkpoint is None else str(made.checkpoint),
            "hashes": hashes,
            "recorded": len(recorded),
            "error": error,
            "mismatches": [
                f"{each.name} of step {each.step} was recorded as {each.recorded!r}, "
                f"but replayed as {each.remade!r}"
                for each in mismatches
            ],
            "reasons": why_different(made, []) if mismatches else [],
        }
        if run.ranks.is_main:
            with atomic_file(out / "replay.json") as file:
                file.write(json.dumps(facts).encode())


def _state_hashes(run: Run) -> list[str]:
    """Return a hash of the parameters and the optimizer state for each different shard (a collective)."""
    hashes: Mapping[str, int] = bit_hashes((n, to_local(t)) for n, t in run.strategy.replicated(run.state))
    own = hashlib.blake2b(repr(hashes).encode(), digest_size=8).hexdigest()
    return list(dict.fromkeys(gather_objects(own)))


def main() -> None:
    parser = arguments("trainer.diff.trace", __doc__, trains=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--steps", type=int, nargs="+", required=True)
    parser.add_argument("--from", dest="checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)

    def do(options: argparse.Namespace, config: Any) -> None:
        trace(options.run, options.first, options.steps, options.checkpoint, options.out)

    start("trainer.diff.trace", parser, do, trains=True)


if __name__ == "__main__":
    main()
