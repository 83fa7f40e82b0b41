"""A model built without memory: its constructor is recorded, and replayed for each tensor that is needed.

While the constructor runs, every tensor it creates is on the meta device, and its operations are recorded. To
fill a tensor, only the operations that its memory depends on are run on real memory, so a rank never holds
more of the model than it asks for. Each random operation draws from its own generator, seeded by the run's
seed and by its number in the recording: the values do not depend on which rank replays, or on what else it
replays. (torchdistX's deferred_init does the same in C++, with one generator for all.)
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from trainer.distributed.seeding import seed_everything
from trainer.errors import UserError, first_line
from trainer.meta_init.module_tensors import (
    has_gradient_hook,
    held_elsewhere,
    holders,
    like,
    named_tensors,
    replace,
)
from trainer.meta_init.operations import storage_of
from trainer.meta_init.pretend_cpu import PretendCpuMode
from trainer.meta_init.recorder import KINDS, InitRecorder, NotRecordable, new_objects_alone
from trainer.meta_init.unwritten import is_unwritten

log = logging.getLogger(__name__)


class Deferred:
    """A model on the meta device, or whole, and how to fill it.

    Attributes:
        module: as its constructor built it; equal on every rank.
        notes: why it was built whole, if it was.
    """

    def __init__(self, module: nn.Module, recorder: InitRecorder | None, *notes: str) -> None:
        self.module, self.notes, self._recorder = module, notes, recorder
        self._names: dict[int, str] = {}
        for name, tensor in named_tensors(module):
            self._names.setdefault(id(tensor), name)

    def fill(self, module: nn.Module) -> None:
        """Give the tensors of `module`, the model or a part of it, memory on the CPU and their values.

        Raises:
            UserError: the constructor left a parameter uninitialised (the message names it).
        """
        if self._recorder is None:
            return
        waiting = {id(tensor): tensor for _, tensor in named_tensors(module) if tensor.is_meta}
        replace(module, map(self._checked, self._recorder.operations.real(waiting.values())))

    def fill_hidden(self, alive: list[Tensor]) -> None:
        """Fill the tensors that no module holds: those of closures, caches, objects of any kind.

        `fill` would not find them, so they are whole from the start, on every rank.
        """
        assert self._recorder is not None
        named = [tensor for _, tensor in named_tensors(self.module) if self._recorder.holds(tensor)]
        # The base of a view lives as long as the view, even if only `alive` refers to it.
        bases = {id(tensor._base) for tensor in named} & {id(each) for each in alive}
        bases -= {id(each) for holder, each in holders(bases) if holder is not alive}
        hidden = [each for each in alive if id(each) not in bases]
        if not set(map(storage_of, named)).isdisjoint(map(storage_of, hidden)):
            raise NotRecordable("an object outside its modules shares memory with a tensor of a module")
        _make_real(self._recorder, hidden)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from `tensors`, by their names in the module; they are kept as long as this object."""
        if self._recorder is None:
            self.module.load_state_dict(tensors, strict=False)
            return
        self._recorder.keeps_given = True
        with PretendCpuMode(self._recorder), self._recorder:
            self.module.load_state_dict(tensors, strict=False)

    def _checked(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        assert self._recorder is not None
        tensor, real = pair
        unwritten = is_unwritten(real, isinstance(tensor, nn.Parameter))
        if unwritten is None:
            unwritten = torch.full(real.shape, not self._recorder.operations.is_written(tensor))
        if not unwritten.any():
            return pair
        name = self._names[id(tensor)]
        if isinstance(tensor, nn.Parameter):
            raise UserError(
                f"model: {int(unwritten.sum())} of the {real.numel()} numbers of {name} are never "
                "initialised by its constructor (or model.init_from has NaN there); "
                "initialise them"
            )
        real[unwritten] = 0
        log.warning("model: %s is not initialised; %d of its numbers start as 0", name, int(unwritten.sum()))
        return pair


def deferred(build: Callable[[], nn.Module], seed: int) -> Deferred:
    """Run `build` on the meta device or, if that fails, for real.

    A constructor may do what needs no memory, and also use `.item()`, given data, tied weights and views.
    It cannot write into NumPy arrays, draw from a torch.Generator, seed torch itself, create sparse tensors,
    ask for a tensor's storage, or change a tensor after it was used to initialise another. Then
    it is run again, and builds the whole model; `notes` say why.

    Args:
        build: called once or twice; deterministic except for random generators.
        seed: determines, with the order of the random operations, all random numbers.
    """
    seed_everything(seed, 0)
    recorder = InitRecorder(seed)
    try:
        return _recorded(build, recorder)
    except (Exception, NotRecordable) as error:  # a real error is raised again by the second build
        reason = first_line(error)
    # A cache may have kept tensors of this attempt, which the second build will use.
    with contextlib.suppress(Exception, NotRecordable):
        _make_real(recorder, recorder.alive(besides=()))
    seed_everything(seed, 0)
    return Deferred(build(), None, f"the model is built whole on every rank: {reason}")


def _recorded(build: Callable[[], nn.Module], recorder: InitRecorder) -> Deferred:
    with new_objects_alone():
        with PretendCpuMode(recorder), recorder:
            model = build()
        alive = recorder.alive(besides=[tensor for _, tensor in named_tensors(model)])
    recorder.check_seed()
    recorder.check_given()
    for name, tensor in named_tensors(model):
        if type(tensor) not in KINDS:
            raise NotRecordable(f"{name} is a {type(tensor).__name__}")
        if tensor.is_meta and not recorder.holds(tensor):
            raise NotRecordable(f"{name} is on the meta device")
        if has_gradient_hook(tensor):  # it would stay with the tensor that is replaced
            raise NotRecordable(f"{name} has a hook on its gradient")
    if elsewhere := held_elsewhere(model):
        raise NotRecordable(f"{elsewhere} is also referred to from outside its module")
    found = Deferred(model, recorder)
    found.fill_hidden(alive)
    return found


def _make_real(recorder: InitRecorder, tensors: Sequence[Tensor]) -> None:
    """Fill tensors that any object may refer to: they stay the same objects."""
    for tensor, real in recorder.operations.real(tensors):
        if weakref.getweakrefs(tensor):
            raise NotRecordable("an object outside its modules refers to a tensor with weak references")
        with contextlib.suppress(RuntimeError):  # referred to only by a graph, or a gradient
            torch.utils.swap_tensors(tensor, like(tensor, real))
