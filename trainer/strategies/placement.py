"""Check and change the devices and memory layouts of a model's parameters."""

import itertools
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.errors import UserError, first_few
from trainer.tensors.local_shard import spanned_bytes, storage_of


def lay_out_channels_last(model: nn.Module) -> None:
    """Convert 4-dimensional weights once; otherwise, each call of a convolution would convert its weight."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            # contiguous() would not change the strides of 1x1 convolutions, by which torch chooses kernels.
            laid_out = torch.empty_like(parameter.data, memory_format=torch.channels_last)
            parameter.data = laid_out.copy_(parameter.data)


def devices_of(model: nn.Module) -> list[torch.device]:
    """Return the distinct devices of the parameters, in order."""
    return list(dict.fromkeys(parameter.device for parameter in model.parameters()))


def refuse_several_devices(model: nn.Module, strategy: str) -> None:
    if len(placed := devices_of(model)) > 1:
        raise UserError(
            f"{strategy} places the model itself, but the model's constructor has placed it on "
            f"{', '.join(map(str, placed))}; remove the placement from the constructor, or use "
            "strategy=ddp or single"
        )


def refuse_shared_memory(model: nn.Module, strategy: str) -> None:
    """Raise UserError if a trainable parameter shares memory with another parameter or a buffer."""
    by_storage: dict[int, list[tuple[int, int, str, Tensor]]] = defaultdict(list)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.numel() and tensor.layout == torch.strided:
            begin = int(tensor.storage_offset()) * tensor.itemsize
            span = (begin, begin + spanned_bytes(tensor), name, tensor)
            by_storage[storage_of(tensor)].append(span)
    for spans in by_storage.values():
        for (_, end, name, first), (begin, _, other, second) in itertools.pairwise(sorted(spans)):
            if begin < end and (first.requires_grad or second.requires_grad):
                raise UserError(
                    f"{name} and {other} share memory, but {strategy} would give them separate memory, so "
                    f"that they would no longer be tied. Make them one nn.Parameter ({name} = {other}), or "
                    "separate them (clone()); or use strategy=ddp on CPUs"
                )


def unused_parameters(unused: Sequence[str]) -> str:
    """Return the end of an error message about `unused` parameters ([] if their names are unknown)."""
    return (
        f"{first_few(unused, 3) if unused else 'all parameters'}, but DDP waits for the gradient of every "
        "parameter; set strategy.find_unused_parameters=true, remove unused parameters from the model, or "
        "freeze them (model.freeze). With torch.utils.checkpoint, parameters also get no gradients if its "
        "inputs need none, unless you pass use_reentrant=False"
    )
