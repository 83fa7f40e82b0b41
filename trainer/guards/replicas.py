"""Compares, by hash, the parameters and optimizer state of ranks that must hold the same bits.

Gradients are averaged, so a rank whose memory or arithmetic failed once continues with other parameters
than its peers forever, unnoticed: losses differ anyway, and a checkpoint holds one rank's values.

Buffers are compared in buffers.py, with a warning alone: running statistics follow each rank's own data by
design, and rank 0's are used wherever the model is evaluated or saved.
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
from trainer.state.train_state import TrainState
from trainer.tensors.bits import bit_hashes
from trainer.tensors.local_shard import to_local


class ReplicaCheck:
    """Compares the ranks of each group of equal ones every few steps, and before each save.

    A check reads each parameter and each tensor of the optimizer once, on its device, and gathers 8 bytes
    from each rank. The differing tensor is looked for only if hashes differ.
    """

    def __init__(
        self,
        ranks: Ranks,
        groups: Sequence[tuple[int, ...]],
        every: int | None,
        replicated: Callable[[TrainState], Iterable[tuple[str, Tensor]]] = TrainState.replicated,
    ) -> None:
        """
        Args:
            groups: groups of ranks that hold the same; no two groups share a rank.
            every: steps between checks; None never checks.
            replicated: yields what they hold, by name.
        """
        self._ranks, self._every, self._replicated = ranks, every, replicated
        self._groups = groups
        self._checked_at: int | None = None  # the last step at which all was equal

    def check_if_due(self, state: TrainState) -> None:
        """`check`, if the number of steps says so."""
        if self._every is not None and state.progress.step % self._every == 0:
            self.check(state)

    def check(self, state: TrainState) -> None:
        """Compare now, unless this step was compared already (a collective; waits for the device).

        Raises:
            ReplicasDifferError: on every rank, if some rank differs from its replicas.
        """
        step = state.progress.step
        if self._every is None or not self._groups or self._checked_at == step:
            return
        hashes = self._hashes(state)
        mine = torch.tensor([_overall(hashes)], device=self._ranks.device)
        gathered = mine.new_empty(self._ranks.world_size)
        all_gather_single(gathered, mine)
        by_rank = gathered.tolist()
        if any(len({by_rank[rank] for rank in group}) > 1 for group in self._groups):
            raise self._verdict(step, by_rank, gather_objects(hashes))
        self._checked_at = step

    def _hashes(self, state: TrainState) -> dict[str, int]:
        """Hashes of what this rank shares, by name."""
        return bit_hashes((name, to_local(tensor)) for name, tensor in self._replicated(state))

    def _verdict(
        self, step: int, by_rank: Sequence[int], everyones: Sequence[Mapping[str, int]]
    ) -> ReplicasDifferError:
        """Name the odd ranks, by majority within each group; without a majority, say which ranks differ."""
        describe, blamed, sentences = self._ranks.describe, [], []
        for group in self._groups:
            ranked = Counter(by_rank[rank] for rank in group).most_common()
            camps = [[rank for rank in group if by_rank[rank] == value] for value, _ in ranked]
            majority = camps[0]
            for camp in camps[1:]:
                where = _first_difference(everyones[camp[0]], everyones[majority[0]])
                named = " and ".join(map(describe, camp))
                if 2 * len(majority) > len(group):
                    blamed += camp
                    sentences.append(f"{named}, unlike ranks {first_few(majority, 8)}, first in {where}")
                else:
                    sentences.append(
                        f"{named}, unlike {' and '.join(map(describe, majority))}, first in {where}; "
                        "without a majority it is unknown which is right"
                    )
        equal_at = "" if self._checked_at is None else f" (they were equal at step {self._checked_at})"
        return ReplicasDifferError(
            f"replicas differ after step {step}{equal_at}: {'; '.join(sentences)}. "
            "Nothing was saved since; the same run_dir with resume=auto continues from the last checkpoint. "
            "Suspect code that "
            "treats ranks differently: a call of model.module past DDP, an update of its own, as in a hook; "
            "or the memory or the processor there. To train on different processors together, set "
            "train.check_replicas_every=null",
            tuple(sorted(blamed)),
        )


def _overall(hashes: Mapping[str, int]) -> int:
    digest = hashlib.blake2b(repr(hashes).encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def _first_difference(theirs: Mapping[str, int], right: Mapping[str, int]) -> str:
    """The first tensor that differs, in the model's order, and how many more do."""
    names = [*right, *(theirs.keys() - right.keys())]
    different = [name for name in names if theirs.get(name) != right.get(name)]
    return first_few(different, 1)
