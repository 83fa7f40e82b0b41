"""Buffers that a forward pass made or replaced: a model as built does not have them as they were saved."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from trainer.bits import same_bits
from trainer.checkpoint.open_checkpoint import OpenCheckpoint
from trainer.distributed.agreement import Agreement
from trainer.distributed.process_group import Dist
from trainer.errors import UserError, first_few
from trainer.local_shard import is_dtensor, spanned_bytes
from trainer.optim.plain_names import every_parameter, named_buffers, named_modules


def compare_buffers(model: nn.Module, agreement: Agreement, dist: Dist) -> None:
    """Raise UserError on every rank if forward passes made other buffers on some: all get those of rank 0."""
    mine = {name: (tuple(buffer.shape), str(buffer.dtype)) for name, buffer in named_buffers(model)}
    reference, *others = agreement.gather(mine)
    for rank, theirs in enumerate(others, start=1):
        if differ := sorted(dict(reference.items() ^ theirs.items())):
            raise UserError(
                f"{dist.describe(rank)} differs from rank 0 in the buffers {first_few(differ)}, which a "
                "forward pass made or resized: let all ranks make the same, or register them in __init__"
            )


@torch.no_grad()
def make_buffers(model: nn.Module, source: OpenCheckpoint, device: torch.device) -> list[str]:
    """Give `model` the buffers of `source`, before its values are read into them.

    Those that a forward pass made, with persistent=False, are registered. Those that begin in the memory of
    another tensor, and were saved with other values than it, get memory of their own.

    Args:
        device: where the model computes, unless a module of it is elsewhere.

    Returns:
        The names of saved buffers that this model has no place for.
    """
    modules, left = dict(named_modules(model)), []
    saved = {
        name.partition(".")[2]: name for name in source.shapes if name.startswith(("model.", "buffers."))
    }
    for name in sorted(saved.keys() - dict(named_buffers(model)).keys()):
        if not saved[name].startswith("buffers."):
            continue
        prefix, _, leaf = name.rpartition(".")
        value = source.read_named([saved[name]])[saved[name]]
        try:
            module = modules[prefix]
            module.register_buffer(leaf, value.to(_device_of(module, device), copy=True), persistent=False)
        except KeyError:  # of `modules`, or since the module has something else of this name
            left.append(name)
    _separate(model, modules, saved, source)
    return left


def _separate(
    model: nn.Module, modules: Mapping[str, nn.Module], saved: Mapping[str, str], source: OpenCheckpoint
) -> None:
    """Give buffers memory of their own if their saved values do not fit into that which they share."""
    buffers = dict(named_buffers(model))
    plain = {name: p.detach() for name, p in every_parameter(model) if not is_dtensor(p)}
    for names in _sharing_memory(buffers | plain):
        # Parameters are written last, and so never overwritten: they keep the memory.
        tensors = {name: each[name] for each in (buffers, plain) for name in names if name in each}
        same = [
            name
            for name, tensor in tensors.items()
            if name in saved and source.shapes[saved[name]] == (tensor.shape, tensor.dtype)
        ]
        if buffers.keys().isdisjoint(same):  # tied weights
            continue
        values = source.read_named([saved[name] for name in same])
        for name in same:
            tensors[name].copy_(values[saved[name]])
        for name in same:
            value = values[saved[name]].to(tensors[name].device)
            if name in buffers and not same_bits(value, tensors[name]):
                prefix, _, leaf = name.rpartition(".")
                setattr(modules[prefix], leaf, value.clone())


def _sharing_memory(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """The names of `tensors` whose memory overlaps, group by group; those alone are left out."""
    spans = []
    for name, tensor in tensors.items():
        if tensor.numel():
            begin = tensor.data_ptr()
            spans.append((begin, begin + spanned_bytes(tensor), name))
    group: list[str] = []
    reach = 0
    for begin, end, name in sorted(spans):
        if begin >= reach:
            if len(group) > 1:
                yield group
            group = []
        group.append(name)
        reach = max(reach, end)
    if len(group) > 1:
        yield group


def _device_of(module: nn.Module, device: torch.device) -> torch.device:
    """That of the module's tensors, if the model is split over several of the kind of `device`."""
    held = (tensor.device for tensor in (*module.buffers(), *module.parameters()))
    return next((each for each in held if each.type == device.type), device)
