"""Whether all ranks used the same parameters: FSDP reduces all gradients of a unit as one row.

If ranks use different parameters, it adds unrelated gradients: silently if the rows have the same
length, and otherwise with an error of the backend.
"""

import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from trainer.distributed.agreement import gather_objects
from trainer.distributed.process_group import Dist
from trainer.errors import UserError

_FOREKNOWN_STEPS = 3


class UsedParameters:
    """Compares the ranks: in the first steps before they reduce, in each step by a hash in the background.

    The first steps' use is known from the graph; later steps' from their gradients.

    Args:
        model: sharded.
    """

    def __init__(self, model: nn.Module, dist_: Dist, timeout_s: float) -> None:
        self._dist = dist_
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._names, self._parameters = [name for name, _ in trained], [p for _, p in trained]
        # A separate group from all that a step sends; MPI has no other.
        own = None if dist_.backend == "mpi" else "gloo"
        self._group: Any = dist.new_group(timeout=timedelta(seconds=timeout_s), backend=own)
        self._work: dist.Work | None = None
        self.reduces = True  # whether gradients are reduced in this pass
        self._left = _FOREKNOWN_STEPS
        self._reached: set[str] | None = None  # since the last reduction
        self._whole: dict[Tensor, str] = {}  # gathered parameters, which have the gradients
        self._handles = [model.register_forward_hook(self._look_ahead)]
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                note = partial(self._note, f"{name}." if name else "")
                self._handles.append(cast(nn.Module, module).register_forward_pre_hook(note))

    def _note(self, prefix: str, unit: nn.Module, inputs: Any) -> None:
        gathered = ((name, p) for name, p in unit.named_parameters() if not isinstance(p, DTensor))
        self._whole.update((parameter, prefix + name) for name, parameter in gathered)

    def _look_ahead(self, model: nn.Module, inputs: Any, output: Any) -> None:
        outputs = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
        reached = {self._whole[leaf] for leaf in _leaves(outputs) if leaf in self._whole}
        self._reached = reached | (self._reached or set())
        for each in outputs:
            each.register_hook(self._before_reducing)

    def _before_reducing(self, gradient: Tensor) -> None:
        """Called when a backward pass begins, for each output; compares once, in a pass that reduces."""
        if not self.reduces or self._reached is None:
            return
        used, self._reached = bytes(name in self._reached for name in self._names), None
        self._left -= 1
        if not self._left:
            self._whole.clear()
            for handle in self._handles:
                handle.remove()
        self._send(used)
        self.settle()

    def launch(self) -> None:
        """Send a hash of which gradients exist. Called after each step's last backward pass."""
        self._send(bytes(parameter.grad is not None for parameter in self._parameters))

    def _send(self, used: bytes) -> None:
        self._used, word = used, zlib.crc32(used)
        self._range = torch.tensor([word, -word])
        self._work = dist.all_reduce(self._range, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def settle(self) -> None:
        """Wait for the hashes of all ranks.

        Raises:
            UserError: on every rank, if ranks used different parameters.
        """
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if self._range.sum():
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
    differ = [number for number, _ in enumerate(names) if len({used[number] for used in everyones}) > 1]
    first = differ[0]
    ranks = {
        uses: ", ".join(str(rank) for rank, used in enumerate(everyones) if used[first] == uses)
        for uses in (True, False)
    }
    more = f" (and {len(differ) - 1} more)" * bool(differ[1:])
    return (
        f"strategy=fsdp: a step used {names[first]}{more} on rank {ranks[True]} and not on {ranks[False]}, "
        "but ranks reduce the gradients of a unit as one. Nothing was saved since. Let all ranks use the "
        "same parameters in a step, or take strategy=ddp strategy.find_unused_parameters=true"
    )
