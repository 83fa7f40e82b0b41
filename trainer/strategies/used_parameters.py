"""Checks that all ranks used the same parameters: FSDP reduces all gradients of a unit as one row.

If ranks use different parameters, it adds unrelated gradients: silently if the rows have the same
length, and otherwise with an error of the backend.
"""

import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainer.distributed.agreement import gather_objects
from trainer.distributed.collectives import extremes
from trainer.distributed.process_group import Dist
from trainer.errors import UserError, first_few
from trainer.strategies.gathered_parameters import GatheredParameters

_NUM_AHEAD = 3  # passes that are compared before they reduce


class UsedParameters:
    """Compares which parameters the ranks used: after each step, by a hash in the background.

    The first steps are also compared before they reduce anything: the graph shows which parameters a backward
    pass will reach. After a step the gradients show it.

    Args:
        model: sharded.
        gathered: its gathered parameters; if any rank changed one, `finish` raises on all.
        timeout_s: how long to wait for a rank.
    """

    def __init__(self, model: nn.Module, gathered: GatheredParameters, dist_: Dist, timeout_s: float) -> None:
        self._gathered = gathered
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._names, self._parameters = [name for name, _ in trained], [p for _, p in trained]
        # A separate group from all that a step sends; MPI has no other.
        own = None if dist_.backend == "mpi" else "gloo"
        self._group: Any = dist.new_group(timeout=timedelta(seconds=timeout_s), backend=own)
        self._work: dist.Work | None = None
        self.reduces = True  # whether gradients are reduced in this pass
        self._left_ahead = _NUM_AHEAD
        self._reached: set[str] | None = None  # by the graphs since the last reduction
        self._hook = model.register_forward_hook(self._look_ahead)

    def _look_ahead(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Called after each of the first forward passes: notes which parameters its graph reaches."""
        outputs = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
        names = self._gathered.names  # gathered parameters are the leaves of the graph
        reached = {names[leaf] for leaf in _leaves(outputs) if leaf in names}
        self._reached = reached | (self._reached or set())
        for each in outputs:
            each.register_hook(self._before_reducing)

    def _before_reducing(self, gradient: Tensor) -> None:
        """Called when a backward pass begins, for each output; compares once, in a pass that reduces."""
        if not self.reduces or self._reached is None:
            return
        used, self._reached = bytes(name in self._reached for name in self._names), None
        self._left_ahead -= 1
        if not self._left_ahead:
            self._hook.remove()
        self._send(used, [])
        self.finish()

    def start(self) -> None:
        """Send a hash of which gradients exist. Called after each step's last backward pass."""
        used = bytes(parameter.grad is not None for parameter in self._parameters)
        self._send(used, self._gathered.changed(step_is_over=False))

    def look_again(self) -> None:
        """Compare what later passes changed, such as those of an evaluation (a collective)."""
        self.finish()
        self._send(b"", self._gathered.changed(step_is_over=True))
        self.finish()

    def _send(self, used: bytes, changed: list[str]) -> None:
        """Start the comparison. `used`: by parameter, 1 or 0; `changed`: names of gathered parameters."""
        self._used, self._changed, crc = used, changed, zlib.crc32(used)
        self._most = torch.tensor([*extremes([crc]), bool(changed)])
        self._work = dist.all_reduce(self._most, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def finish(self) -> None:
        """Wait for the hashes of all ranks.

        Raises:
            UserError: on every rank, if ranks used different parameters, or changed gathered ones.
        """
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        most, minus_least, any_changed = self._most.tolist()
        if any_changed:
            changed = sorted(set().union(*gather_objects(self._changed, self._group)))
            raise UserError(
                f"strategy=fsdp: a forward or backward pass or the loss changes {first_few(changed)} in a "
                "gathered copy (its values or requires_grad), so that the change is lost; this "
                "run's checkpoints may lack earlier ones. Compute with another tensor "
                "(weight.clamp(-c, c)), or use strategy=ddp"
            )
        if most != -minus_least:
            raise UserError(_verdict(self._names, gather_objects(self._used, self._group)))


def _leaves(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaf tensors to which a backward pass from `outputs` gives gradients."""
    nodes = [output.grad_fn for output in outputs]
    seen = set(nodes)
    while nodes:
        if (node := nodes.pop()) is None:
            continue
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        new = {following for following, _ in node.next_functions} - seen
        seen |= new
        nodes += new


def _verdict(names: Sequence[str], everyones: Sequence[bytes]) -> str:
    """The message; `everyones`: by rank, which of the parameters in `names` it used, as 1 or 0 each."""
    differ = [number for number, _ in enumerate(names) if len({used[number] for used in everyones}) > 1]
    named = first_few((names[number] for number in differ), 1)
    ranks = {
        uses: ", ".join(str(rank) for rank, used in enumerate(everyones) if used[differ[0]] == uses)
        for uses in (True, False)
    }
    return (
        f"strategy=fsdp: a step used {named} on rank {ranks[True]} and not on {ranks[False]}, "
        "but ranks reduce the gradients of a unit as one. Nothing was saved since. Let all ranks use the "
        "same parameters in a step, or use strategy=ddp strategy.find_unused_parameters=true"
    )
