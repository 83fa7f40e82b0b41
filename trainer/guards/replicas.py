"""Compare hashes of the parameters and optimizer state of replicas.

Because gradients are averaged, a rank whose memory or arithmetic failed once would continue with parameters
that differ from those of its replicas. Nobody would notice: losses differ between ranks anyway, and a
checkpoint contains the values of one rank.

Buffers are compared in buffers.py, which only warns, because running statistics depend on each rank's data by
design, and evaluations and saves use those of rank 0.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from trainer.distributed.agreement import gather_objects
from trainer.distributed.collectives import all_gather_single
from trainer.distributed.ranks import Ranks
from trainer.errors import ReplicasDifferError, first_few
from trainer.model.plain_names import parameter_names
from trainer.state.train_state import TrainState
from trainer.tensors.bits import bit_hashes
from trainer.tensors.local_shard import to_local

_EXACT_IN_JSON = 2**53 - 1  # readers of JSON may convert integers to floats


class ReplicaCheck:
    """Compares the replicas of each group every few steps and before each save.

    A check reads each parameter and each tensor of the optimizer once, on its device, and gathers 8 bytes
    from each rank. The hash of each tensor is gathered only if the hashes of the whole state differ.
    """

    def __init__(
        self,
        ranks: Ranks,
        groups: Sequence[tuple[int, ...]],
        every: int | None,
        replicated: Callable[[TrainState], Iterable[tuple[str, Tensor]]] = TrainState.replicated,
        record: Callable[[int, int], None] = lambda weights_hash, step: None,
    ) -> None:
        """
        Args:
            groups: disjoint groups of ranks that must have equal values.
            every: steps between checks; None disables them.
            record: called with the hash of the whole model's weights and the step, at each check, if each
                rank has all weights.
        """
        self._has_whole_model = list(groups) == [tuple(range(ranks.world_size))] or ranks.world_size == 1
        self._every = every if groups or self._has_whole_model else None
        self._ranks, self._groups, self._replicated, self._record = ranks, groups, replicated, record
        self._checked_at: int | None = None  # the last step at which all replicas were equal

    def check_if_due(self, state: TrainState) -> None:
        if self._every is not None and state.progress.step % self._every == 0:
            self.check(state)

    def check(self, state: TrainState) -> None:
        """Compare the replicas, unless this step has been compared (a collective that waits for the device).

        Raises:
            ReplicasDifferError: on every rank, if a rank differs from its replicas.
        """
        step = state.progress.step
        if self._every is None or self._checked_at == step:
            return
        hashes = self._hashes(state)
        if self._groups:
            own = torch.tensor([_overall(hashes)], device=self._ranks.device)
            gathered = own.new_empty(self._ranks.world_size)
            all_gather_single(gathered, own)
            by_rank = gathered.tolist()
            if any(len({by_rank[rank] for rank in group}) > 1 for group in self._groups):
                raise self._error(step, by_rank, gather_objects(hashes))
        if self._has_whole_model and self._ranks.is_main:
            weights = {name: hashes[name] for name, _ in parameter_names(state.model)}
            self._record(_overall(weights) & _EXACT_IN_JSON, step)
        self._checked_at = step

    def _hashes(self, state: TrainState) -> dict[str, int]:
        named = self._replicated(state) if self._groups else parameter_names(state.model)
        return bit_hashes((name, to_local(tensor)) for name, tensor in named)

    def _error(
        self, step: int, by_rank: Sequence[int], all_hashes: Sequence[Mapping[str, int]]
    ) -> ReplicasDifferError:
        """Return the error. It names the ranks outside the majority or, without a majority, all ranks."""
        describe, suspects, differences = self._ranks.describe, [], []
        for group in self._groups:
            ranked = Counter(by_rank[rank] for rank in group).most_common()
            equal_ranks = [[rank for rank in group if by_rank[rank] == value] for value, _ in ranked]
            majority = equal_ranks[0]
            for minority in equal_ranks[1:]:
                tensor = _first_difference(all_hashes[minority[0]], all_hashes[majority[0]])
                verb = "differs" if len(minority) == 1 else "differ"
                named = f"{' and '.join(map(describe, minority))} {verb}"
                if 2 * len(majority) > len(group):
                    suspects += minority
                    differences.append(f"{named} from ranks {first_few(majority, 8)}, first in {tensor}")
                else:
                    differences.append(
                        f"{named} from {' and '.join(map(describe, majority))}, first in {tensor}; "
                        "without a majority it is unknown which rank is right"
                    )
        equal_at = "" if self._checked_at is None else f" (they were equal at step {self._checked_at})"
        return ReplicasDifferError(
            f"replicas differ after step {step}{equal_at}: {'; '.join(differences)}. "
            "This state has not been saved. To continue from the last checkpoint, start again with the same "
            "run_dir and resume=auto. Possible causes are code that treats ranks differently, such as a call "
            "of model.module that bypasses DDP or an update in a hook, and faulty memory or a faulty "
            "processor. To train on different types of processors together, set "
            "train.check_replicas_every=null",
            tuple(sorted(suspects)),
        )


def _overall(hashes: Mapping[str, int]) -> int:
    digest = hashlib.blake2b(repr(hashes).encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def _first_difference(hashes: Mapping[str, int], expected: Mapping[str, int]) -> str:
    names = [*expected, *(hashes.keys() - expected.keys())]
    different = [name for name in names if hashes.get(name) != expected.get(name)]
    return first_few(different, 1)
