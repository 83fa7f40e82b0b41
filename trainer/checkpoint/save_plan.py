"""What a save will hold, and which rank writes which part of it: each rank reports to rank 0."""

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
    """What each rank tells rank 0 ahead of a save."""

    layout: str  # a hash of names, shapes and dtypes of what any rank may write
    states: dict[str, Any]  # by parameter, the JSON part of the optimizer's state that only this rank has
    tensors: dict[str, tuple[torch.Size, torch.dtype]]  # the tensors in it, by their names in a checkpoint
    not_finite: list[str]
    data_state: Mapping[str, Any]


class Draft:
    """What a save will hold, as far as this rank knows. Rank 0 adds what other ranks report.

    Attributes:
        tensors: by their names in the checkpoint; those that only another rank has are on the meta device.
        facts: all else, for JSON.
        follows_data: names of tensors that may differ between ranks, as their data does. Rank 0's are saved.
        written_by: by name, the rank that writes a tensor in any case.
    """

    def __init__(self, state: TrainState, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
        self.tensors, self.facts = tensors, {"state": plain}
        self.follows_data = {*buffer_names(state.model), *filter(is_extra_state, tensors)}
        self.written_by = dict.fromkeys(self.follows_data, 0)

    def add_data_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Add where the data of each rank stands."""
        found, plain = take_apart({DATA_STATES: list(states)})
        self.tensors |= found
        self.facts |= plain
        self.follows_data |= found.keys()
        self.written_by |= dict.fromkeys(found, 0)

    def add(self, reports: Sequence[SaveReport]) -> bool:
        """Add the reports of all ranks, by rank; return whether all ranks have tensors of one layout."""
        self.add_data_states([of_rank.data_state for of_rank in reports])
        for rank, of_rank in enumerate(reports[1:], start=1):
            self.facts["state"]["optimizer"]["state"] |= of_rank.states
            self.written_by |= dict.fromkeys(of_rank.tensors, rank)
            for name, (shape, dtype) in of_rank.tensors.items():
                self.tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
        return len({of_rank.layout for of_rank in reports}) == 1


class Planner:
    """Plans the saves of a run; while its tensors stay the same, it returns the same plan."""

    def __init__(self, savable: Savable, format: str, ranks: Ranks) -> None:
        self._savable, self._format, self._ranks = savable, format, ranks
        self._last: tuple[Any, Plan] | None = None  # what it was made for, and the plan

    def report(self, draft: Draft, state: TrainState, data_state: Mapping[str, Any]) -> SaveReport:
        """Complete the `draft` of this rank, and describe it to rank 0."""
        trainable, rank, live = state.trainable, self._ranks.rank, draft.tensors
        writers = {of: trainable.writer_of(of) for of in trainable.owners}
        if writers or self._last is None:  # the first save sees whether all tensors can be sharded
            owned = {n: parameter_of(n, live[n].shape, trainable) for n in live if n.startswith("optimizer.")}
            draft.written_by |= {name: writers[of] for name, of in owned.items() if of in writers}
        shared = {name: live[name] for name in live if name not in draft.written_by}
        layout = hashlib.sha256(repr(_layout_of(shared)).encode()).hexdigest()
        # Rank 0 looks at all tensors: what it writes follows from the reports.
        own = live if rank == 0 else self.plan(draft, alike=True).part_of(live, rank)
        states, alone = draft.facts["state"]["optimizer"]["state"], own.keys() & draft.written_by.keys()
        return SaveReport(
            layout,
            {of: states[of] for of, writer in writers.items() if writer == rank and of in states},
            {name: (own[name].shape, own[name].dtype) for name in sorted(alone - draft.follows_data)},
            self._savable.new_in(own),
            data_state,
        )

    def plan(self, draft: Draft, alike: bool) -> Plan:
        """Return which rank writes which tensor of `draft`; `alike` as `Draft.add` returned."""
        made_for = _layout_of(draft.tensors), alike
        if self._last is None or self._last[0] != made_for:
            ranks = self._ranks.rank, self._ranks.world_size
            plan = plan_save(draft.tensors, self._format, *ranks, draft.written_by, alike)
            self._last = made_for, plan
        return self._last[1]


def _layout_of(tensors: Mapping[str, Tensor]) -> tuple[Any, Mapping[str, str]]:
    named = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    return named, aliases_in(tensors)
