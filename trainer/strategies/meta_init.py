"""The model as a run begins: the same values on any number of ranks, under any strategy.

A constructor runs as it would alone. Where the strategy shards the model, that is on rank 0: the others build
it on the meta device, whose tensors have no memory, and get one unit after another from rank 0. A model with
`init_tensor` is whole nowhere: each rank draws what it fills, by the seed and the tensor's name.
"""

import gc
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from trainer.distributed.agreement import on_main
from trainer.distributed.collectives import broadcast_tensors
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError, first_line
from trainer.tensors.generators import mixed_seed, seed_everything
from trainer.tensors.local_shard import storage_of
from trainer.tensors.nested import leaves
from trainer.torch_private import own_tensors

_OF_MODULES = vars(nn.Module()).keys()  # attributes of every module


class InitialModel:
    """A model that is whole, or on the meta device until it is filled.

    Attributes:
        module: as its constructor built it; names and shapes are the same on every rank.
        notes: why it was built whole on every rank, if it was.
        loaded: by the id of a tensor of the model, the initial weights from a file; complete on rank 0.
    """

    def __init__(self, module: nn.Module, seed: int, ranks: Ranks | None = None, *notes: str) -> None:
        """`ranks`: if given, rank 0 sends its values to the others; None: each rank has or draws its own."""
        self.module, self.notes, self._seed, self._ranks = module, notes, seed, ranks
        self.loaded: dict[int, Tensor] = {}
        tensors = [(id(tensor), name) for name, tensor in named_tensors(module) if _is_plain(tensor)]
        self._waiting = dict(reversed(tensors))  # to be filled: the first name of each, by its id
        self._given: dict[int, Tensor] = {}  # by the id of the tensor whose place they take

    def load(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        """Start from the tensors that `read` gives, by their names in the module."""
        if hasattr(self.module, "init_tensor"):  # each rank copies what it fills
            held = self.module.state_dict(keep_vars=True)
            self._given = {id(held[name]): tensor for name, tensor in read().items()}
        elif self._ranks is None or self._ranks.is_main:  # which sends them to the others
            self.module.load_state_dict(read(), strict=False)

    def extend(self, extend: Callable[[nn.Module], None]) -> None:
        """Have `extend` add parts to the module; where that is on the meta device, these must be, too."""
        if hasattr(self.module, "init_tensor"):  # it knows nothing of these parts
            self.fill(self.module)
        before = [tensor for _, tensor in named_tensors(self.module)]
        known = {id(tensor) for tensor in before}
        seed_everything(self._seed, 0)
        extend(self.module)
        new = [(id(tensor), name) for name, tensor in named_tensors(self.module) if id(tensor) not in known]
        self._waiting |= {} if hasattr(self.module, "init_tensor") else dict(reversed(new))

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Give the tensors of `module`, the model or a part of it, their values on the CPU.

        If ranks get them from rank 0 this is a collective, and `module` the same part on each.

        Raises:
            UserError: the model's `init_tensor` left out some numbers of a tensor.
        """
        tensors = {id(tensor): tensor for _, tensor in named_tensors(module) if id(tensor) in self._waiting}
        named = [(self._waiting.pop(key), tensor) for key, tensor in tensors.items()]
        if hasattr(self.module, "init_tensor"):
            replace(module, ((tensor, self._drawn(name, tensor)) for name, tensor in named))
        elif self._ranks is not None:
            replace(module, _from_rank_0(list(tensors.values()), self._ranks))

    def _drawn(self, name: str, tensor: Tensor) -> Tensor:
        value = torch.empty_like(tensor, device="cpu")
        if id(tensor) in self._given:
            return value.copy_(self._given[id(tensor)])
        value.fill_(torch.nan if value.is_floating_point() else 0)
        torch.manual_seed(mixed_seed(self._seed, zlib.crc32(name.encode())))
        self.module.init_tensor(name, value)  # type: ignore[operator]
        if left := int(value.isnan().sum()):
            raise UserError(f"model: init_tensor leaves {left} of the {value.numel()} numbers of {name} out")
        return value


def constructed(build: Callable[[], nn.Module], seed: int, ranks: Ranks | None) -> InitialModel:
    """Return the model of `build` (a collective of `ranks`).

    Args:
        build: called once, or with `ranks` twice; deterministic, except for random generators.
        ranks: if given, only rank 0 needs the whole model, because the strategy fills one unit after another.

    Raises:
        UserError: a cache has kept a tensor without memory from the first call.
    """
    if ranks is None or ranks.world_size == 1:
        return InitialModel(_whole(build, seed), seed)
    draft, reason = on_meta(build, seed)
    if draft is not None and hasattr(draft, "init_tensor"):
        return InitialModel(draft, seed)
    model = _whole(build, seed) if ranks.is_main or draft is None else draft
    if draft is not None and on_main(lambda: _described(model) != _described(draft), ranks):
        reason = "its constructor does something else on the meta device"
        model = model if ranks.is_main else _whole(build, seed)
    notes = [f"the model is built whole on every rank: {reason}"] if reason else []
    return InitialModel(model, seed, ranks, *notes)


def constructed_on_meta(build: Callable[[], nn.Module], seed: int) -> InitialModel:
    """Return the model of `build` on the meta device, or on the CPU if it can't be built there."""
    draft, _ = on_meta(build, seed)
    return InitialModel(draft, seed) if draft else constructed(build, seed, None)


def on_meta(build: Callable[[], nn.Module], seed: int) -> tuple[nn.Module | None, str]:
    """The model of `build` on the meta device; or None, and why it cannot be built or filled there."""
    seed_everything(seed, 0)
    known = _alive()
    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:  # a real error is raised again by the call for real
        return None, first_line(error)
    named = {id(tensor): (name, tensor) for name, tensor in named_tensors(model) if tensor.is_meta}
    for name, tensor in named.values():
        if not _is_plain(tensor):
            return None, f"{name} is a {type(tensor).__name__} of layout {tensor.layout}"
    if len({storage_of(tensor) for _, tensor in named.values()}) < len(named):
        return None, "several of its tensors share memory"
    attributes = [value for part in model.modules() for value in vars(part).values()]
    if any(isinstance(value, torch.device) and value.type == "meta" for value in attributes):
        return None, "it keeps the device of a tensor"
    bases = {id(tensor._base) for _, tensor in named.values()}  # which live as long as the views
    gc.collect()
    if _alive().keys() - known.keys() - named.keys() - bases:
        return None, "it keeps tensors where no attribute of a module lists them"
    return model, ""


def _whole(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    seed_everything(seed, 0)
    model = build()
    if kept := [name for name, tensor in named_tensors(model) if tensor.is_meta]:
        raise UserError(
            f"model: {kept[0]} has no numbers. Under fsdp a model is first built on the meta device, and a "
            "cache (functools.cache) kept this tensor from there; leave the cache out, or use strategy=ddp"
        )
    return model


def _from_rank_0(tensors: list[Tensor], ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """Each tensor with the values that it has on rank 0, where there is nothing to replace."""
    if ranks.is_main:
        broadcast_tensors([tensor.detach().to(ranks.device) for tensor in tensors], src=0)
        return []
    values = [torch.empty(tensor.shape, dtype=tensor.dtype, device=ranks.device) for tensor in tensors]
    broadcast_tensors(values, src=0)
    return [
        (t, torch.empty_like(t, device="cpu").copy_(value)) for t, value in zip(tensors, values, strict=True)
    ]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout == torch.strided


def _described(model: nn.Module) -> list[tuple[object, ...]]:
    """What must be alike for tensors to be sent in their order: names, ties, kinds and places."""
    first: dict[int, str] = {}
    return [
        (name, first.setdefault(id(tensor), name), type(tensor), tensor.shape, tensor.stride(), tensor.dtype)
        for name, tensor in named_tensors(model)
        if _is_plain(tensor)
    ]


def _alive() -> dict[int, Tensor]:
    """The tensors on the meta device that any object holds, by id."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    # Other tensors than leaves belong to a graph of a constructor's, which is never used again.
    return {id(tensor): tensor for tensor in tensors if tensor.is_meta and tensor.is_leaf}


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and tensors under other attributes, alone or in lists and dicts."""
    for prefix, part in module.named_modules():
        others = {key: value for key, value in vars(part).items() if key not in _OF_MODULES}
        held = own_tensors(part) | others
        for key, value in held.items():
            name = f"{prefix}.{key}" if prefix else key
            yield from ((name, leaf) for leaf in leaves(value) if isinstance(leaf, Tensor))


def replace(module: nn.Module, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Replace the first of each pair by the second: in place if possible, so that all references follow."""
    others: dict[int, tuple[Tensor, Tensor]] = {}
    for old, real in pairs:
        new = _like(old, real)
        try:
            torch.utils.swap_tensors(old, new)
        except RuntimeError:  # it has weak references, or is in an autograd graph, as by the old weight_norm
            others[id(old)] = old, new
    for part in module.modules() if others else ():  # nn.LSTM creates weak references; setattr updates it
        for name, tensor in [*own_tensors(part).items(), *vars(part).items()]:
            if id(tensor) in others:
                setattr(part, name, others[id(tensor)][1])


def _like(old: Tensor, real: Tensor) -> Tensor:
    """`real` with the properties of `old`: a parameter, requires_grad, attributes set by users."""
    if isinstance(old, nn.Parameter):
        real = nn.Parameter(real, old.requires_grad)
    elif old.requires_grad and old.is_leaf:
        real.requires_grad_()
    real.__dict__.update(old.__dict__)
    return real
