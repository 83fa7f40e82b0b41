"""Combine the ranks' reports of what to save, and plan which rank writes which part."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint.layout import Plan, aliases_in, plan_save
from trainer.checkpoint.open_checkpoint import DATA_STATES
from trainer.checkpoint.restoring import parameter_of
from trainer.checkpoint.savable import Savable
from trainer.checkpoint.tree import is_extra_state, take_apart
from trainer.distributed.ranks import Ranks
from trainer.model.plain_names import buffer_names
from trainer.state.train_state import TrainState


class SaveReport(NamedTuple):
    """The report that each rank sends to rank 0 before a save."""

    layout: str  # a hash of the names, shapes and dtypes of tensors that any rank may write
    states: dict[str, Any]  # the JSON part of optimizer state that only this rank has, by parameter
    tensors: dict[str, tuple[torch.Size, torch.dtype]]  # the tensors in that state, by name in a checkpoint
    not_finite: list[str]
    data_state: Mapping[str, Any]


class Draft:
    """What this rank has to save and, on rank 0, what the other ranks report.

    Attributes:
        tensors: by their names in the checkpoint. Tensors of other ranks are on the meta device.
        facts: the other contents, for JSON.
        follows_data: names of tensors that may differ between ranks because the data does; rank 0's are
            saved.
        written_by: the rank that must write a tensor, by the tensor's name.
    """

    def __init__(self, state: TrainState, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
        self.tensors, self.facts = tensors, {"state": plain}
        self.follows_data = {*buffer_names(state.model), *filter(is_extra_state, tensors)}
        self.written_by = dict.fromkeys(self.follows_data, 0)

    def add_data_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        tensors, plain = take_apart({DATA_STATES: list(states)})
        self.tensors |= tensors
        self.facts |= plain
        self.follows_data |= tensors.keys()
        self.written_by |= dict.fromkeys(tensors, 0)

    def add(self, reports: Sequence[SaveReport]) -> bool:
        """Add the reports of all ranks, in rank order; return whether all ranks have the same layout."""
        self.add_data_states([report.data_state for report in reports])
        for rank, report in enumerate(reports[1:], start=1):
            self.facts["state"]["optimizer"]["state"] |= report.states
            self.written_by |= dict.fromkeys(report.tensors, rank)
            for name, (shape, dtype) in report.tensors.items():
                self.tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
        return len({report.layout for report in reports}) == 1


class Planner:
    """Plans the saves of a run, and reuses the last plan while the tensors stay the same."""

    def __init__(self, savable: Savable, format: str, ranks: Ranks) -> None:
        self._savable, self._format, self._ranks = savable, format, ranks
        self._last: tuple[Any, Plan] | None = None  # the layout of the last plan, and the plan

    def report(self, draft: Draft, state: TrainState, data_state: Mapping[str, Any]) -> SaveReport:
        """Complete the `draft` of this rank, and return the report for rank 0."""
        trainable, rank, live = state.trainable, self._ranks.rank, draft.tensors
        writers = {parameter: trainable.writer_of(parameter) for parameter in trainable.owners}
        if writers or self._last is None:  # the first save checks that all tensors can be sharded
            owned = {n: parameter_of(n, live[n].shape, trainable) for n in live if n.startswith("optimizer.")}
            draft.written_by |= {
                n: writers[parameter] for n, parameter in owned.items() if parameter in writers
            }
        shared = {name: live[name] for name in live if name not in draft.written_by}
        layout = hashlib.sha256(repr(_layout_of(shared)).encode()).hexdigest()
        # Rank 0 checks all tensors, because only the reports determine which ones it writes.
        own = live if rank == 0 else self.plan(draft, alike=True).part_of(live, rank)
        states, assigned = draft.facts["state"]["optimizer"]["state"], own.keys() & draft.written_by.keys()
        return SaveReport(
            layout,
            {name: states[name] for name, writer in writers.items() if writer == rank and name in states},
            {name: (own[name].shape, own[name].dtype) for name in sorted(assigned - draft.follows_data)},
            self._savable.new_in(own),
            data_state,
        )

    def plan(self, draft: Draft, alike: bool) -> Plan:
        """Return the plan for `draft`; `alike` is the value that `Draft.add` returned."""
        layout = _layout_of(draft.tensors), alike
        if self._last is None or self._last[0] != layout:
            ranks = self._ranks.rank, self._ranks.world_size
            plan = plan_save(draft.tensors, self._format, *ranks, draft.written_by, alike)
            self._last = layout, plan
        return self._last[1]


def _layout_of(tensors: Mapping[str, Tensor]) -> tuple[Any, Mapping[str, str]]:
    named = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    return named, aliases_in(tensors)
