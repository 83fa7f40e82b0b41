"""Initialize the model with the same values for any number of ranks and any strategy.

If the strategy shards the model, only rank 0 builds it on the CPU. The other ranks build it on the meta
device, whose tensors have no memory, and receive one unit after another from rank 0.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from trainer.distributed.agreement import on_main
from trainer.distributed.collectives import broadcast_tensors
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError, first_line
from trainer.tensors.generators import seed_everything
from trainer.tensors.local_shard import storage_of
from trainer.tensors.nested import leaves
from trainer.torch_private import own_tensors

_OF_MODULES = vars(nn.Module()).keys()  # attributes of every module


class InitialModel:
    """A model with its initial values, or on the meta device until `fill` gives it these values.

    Args:
        ranks: the ranks to which rank 0 sends its values; None if each rank has the values.

    Attributes:
        module: as its constructor built it; names and shapes are the same on every rank.
        notes: if every rank had to build the whole model, the reason.
        loaded: the initial weights read from a file, by the id of the model's tensor; complete on rank 0.
    """

    def __init__(self, module: nn.Module, seed: int, ranks: Ranks | None = None, *notes: str) -> None:
        self.module, self.notes, self._seed, self._ranks = module, notes, seed, ranks
        self.loaded: dict[int, Tensor] = {}
        self._unfilled = {id(tensor) for _, tensor in named_tensors(module) if _is_plain(tensor)}

    def load(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        """Use the tensors that `read` returns, by their names in the module, as initial values."""
        if self._ranks is None or self._ranks.is_main:  # rank 0 sends them to the other ranks
            self.module.load_state_dict(read(), strict=False)

    def extend(self, extend: Callable[[nn.Module], None]) -> None:
        """Call `extend`, which adds submodules to the module, on the meta device if the module is there."""
        before = [tensor for _, tensor in named_tensors(self.module)]
        known = {id(tensor) for tensor in before}
        seed_everything(self._seed, 0)
        extend(self.module)
        self._unfilled |= {id(tensor) for _, tensor in named_tensors(self.module)} - known

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Give the tensors of `module`, the model or a submodule, their initial values on the CPU.

        This is a collective if rank 0 sends the values; `module` must then be the same submodule on each
        rank.
        """
        tensors = {id(tensor): tensor for _, tensor in named_tensors(module) if id(tensor) in self._unfilled}
        self._unfilled -= tensors.keys()
        if self._ranks is not None:
            replace(module, _from_rank_0(list(tensors.values()), self._ranks))


def constructed(build: Callable[[], nn.Module], seed: int, ranks: Ranks | None) -> InitialModel:
    """Build the model (a collective of `ranks`).

    Args:
        build: called once, or twice if `ranks` is given; must be deterministic apart from torch's generators.
        ranks: if given, only rank 0 builds the whole model, because the strategy fills it unit by unit.

    Raises:
        UserError: in the second call, a cache returned a meta tensor from the first call.
    """
    if ranks is None or ranks.world_size == 1:
        return InitialModel(_whole(build, seed), seed)
    draft, reason = on_meta(build, seed)
    model = _whole(build, seed) if ranks.is_main or draft is None else draft
    if draft is not None and on_main(lambda: _described(model) != _described(draft), ranks):
        reason = "its constructor builds a different model on the meta device"
        model = model if ranks.is_main else _whole(build, seed)
    notes = [f"every rank builds the whole model, because {reason}"] if reason else []
    return InitialModel(model, seed, ranks, *notes)


def constructed_on_meta(build: Callable[[], nn.Module], seed: int) -> InitialModel:
    """Build the model on the meta device, or on the CPU if that fails."""
    draft, _ = on_meta(build, seed)
    return InitialModel(draft, seed) if draft else constructed(build, seed, None)


def on_meta(build: Callable[[], nn.Module], seed: int) -> tuple[nn.Module | None, str]:
    """Build the model on the meta device; if that fails, return None and the reason."""
    seed_everything(seed, 0)
    known = _alive()
    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:  # an error of the model itself is raised again on the CPU
        return None, f"its constructor fails on the meta device: {first_line(error)}"
    named = {id(tensor): (name, tensor) for name, tensor in named_tensors(model) if tensor.is_meta}
    for name, tensor in named.values():
        if not _is_plain(tensor):
            return None, f"{name} is a {type(tensor).__name__} with layout {tensor.layout}"
    if len({storage_of(tensor) for _, tensor in named.values()}) < len(named):
        return None, "several of its tensors share memory"
    attributes = [value for part in model.modules() for value in vars(part).values()]
    if any(isinstance(value, torch.device) and value.type == "meta" for value in attributes):
        return None, "it stores the device of a tensor"
    bases = {id(tensor._base) for _, tensor in named.values()}  # they live as long as their views
    gc.collect()
    if _alive().keys() - known.keys() - named.keys() - bases:
        return None, "it stores tensors outside of module attributes"
    return model, ""


def _whole(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    seed_everything(seed, 0)
    model = build()
    if cached := [name for name, tensor in named_tensors(model) if tensor.is_meta]:
        raise UserError(
            f"model: {cached[0]} has no values. Under fsdp a model is first built on the meta device, and a "
            "cache (functools.cache) returned this tensor again; remove the cache, or use strategy=ddp"
        )
    return model


def _from_rank_0(tensors: list[Tensor], ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a tensor and its replacement with rank 0's values; [] on rank 0."""
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
    """Describe the names, ties, types and layouts of tensors, which must be equal on all ranks."""
    first: dict[int, str] = {}
    return [
        (name, first.setdefault(id(tensor), name), type(tensor), tensor.shape, tensor.stride(), tensor.dtype)
        for name, tensor in named_tensors(model)
        if _is_plain(tensor)
    ]


def _alive() -> dict[int, Tensor]:
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    # Tensors that are not autograd leaves belong to a graph of the constructor, which is never used again.
    return {id(tensor): tensor for tensor in tensors if tensor.is_meta and tensor.is_leaf}


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers, and tensors in other attributes, including nested lists and dicts."""
    for prefix, part in module.named_modules():
        others = {key: value for key, value in vars(part).items() if key not in _OF_MODULES}
        for key, value in (own_tensors(part) | others).items():
            name = f"{prefix}.{key}" if prefix else key
            yield from ((name, leaf) for leaf in leaves(value) if isinstance(leaf, Tensor))


def replace(module: nn.Module, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Replace the first tensor of each pair with the second, in place for all references if possible."""
    others: dict[int, tuple[Tensor, Tensor]] = {}
    for old, real in pairs:
        new = _like(old, real)
        try:
            torch.utils.swap_tensors(old, new)
        except RuntimeError:  # it has weak references or is in a graph, as with torch.nn.utils.weight_norm
            others[id(old)] = old, new
    for part in module.modules() if others else ():  # setattr updates the weak references of nn.LSTM
        for name, tensor in [*own_tensors(part).items(), *vars(part).items()]:
            if id(tensor) in others:
                setattr(part, name, others[id(tensor)][1])


def _like(old: Tensor, real: Tensor) -> Tensor:
    """Give `real` the properties of `old`: nn.Parameter, requires_grad, and attributes set by users."""
    if isinstance(old, nn.Parameter):
        real = nn.Parameter(real, old.requires_grad)
    elif old.requires_grad and old.is_leaf:
        real.requires_grad_()
    real.__dict__.update(old.__dict__)
    return real
