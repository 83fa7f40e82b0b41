"""Where a model is: on its process's device, or where its constructor put it; and what DDP waits for."""

import itertools
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.errors import UserError, first_few
from trainer.tensors.local_shard import spanned_bytes, storage_of


def lay_out_channels_last(model: nn.Module) -> None:
    """Convert the weights of convolutions once, or each convolution would do so at each call."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            # Not contiguous(), which leaves the strides of 1x1 convolutions, and with them the kernels.
            laid_out = torch.empty_like(parameter.data, memory_format=torch.channels_last)
            parameter.data = laid_out.copy_(parameter.data)


def devices_of(model: nn.Module) -> list[torch.device]:
    """The devices of the parameters, in their order: more than one if the model has placed itself."""
    return list(dict.fromkeys(parameter.device for parameter in model.parameters()))


def refuse_several_devices(model: nn.Module, strategy: str) -> None:
    if len(placed := devices_of(model)) > 1:
        raise UserError(
            f"{strategy} decides where the model is, but its constructor has placed it on "
            f"{', '.join(map(str, placed))}; leave that out, or use strategy=ddp or single"
        )


def refuse_shared_memory(model: nn.Module, strategy: str) -> None:
    """Raise UserError, by name, for a trained parameter that shares memory with another one, or a buffer."""
    by_storage: dict[int, list[tuple[int, int, str, Tensor]]] = defaultdict(list)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.numel() and tensor.layout == torch.strided:
            begin = int(tensor.storage_offset()) * tensor.itemsize
            place = (begin, begin + spanned_bytes(tensor), name, tensor)
            by_storage[storage_of(tensor)].append(place)
    for there in by_storage.values():
        for (_, end, name, one), (begin, _, other, two) in itertools.pairwise(sorted(there)):
            if begin < end and (one.requires_grad or two.requires_grad):
                raise UserError(
                    f"{strategy} gives {name} and {other} separate memory, but they share it now, and "
                    f"would no longer be tied. Make them one nn.Parameter ({name} = {other}), or separate "
                    "ones (clone()); or use strategy=ddp on CPUs"
                )


def not_all(idle: Sequence[str]) -> str:
    """That a loss left out the parameters of these names, if they are known, and the way out."""
    return (
        f"{'no ' + first_few(idle, 3) if idle else 'not all parameters'}, and DDP waits for the gradient of "
        "each parameter; set strategy.find_unused_parameters=true, or remove what is never used from the "
        "model, or freeze it (model.freeze). Within torch.utils.checkpoint of inputs without gradients "
        "nothing is used either, unless use_reentrant=False"
    )
