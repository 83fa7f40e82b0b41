"""The bits of tensors: compared, summed and hashed. As numbers, a NaN would differ from itself."""

import functools
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from trainer.accelerator import is_accelerator

_LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Words of 32 bits hashed at a time: 512 KiB of int64 stay in a core's cache, 32 MiB keep a GPU busy.
_CPU_CHUNK, _GPU_CHUNK = 1 << 16, 1 << 22
_CHAIN = 0x2545F4914F6CDD1D  # odd; makes a chunk's hash depend on its place

Named = Iterable[tuple[str, Tensor]]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether both have the same dtype, shape and bits; a NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(bytes_of(one), bytes_of(other))


def bytes_of(tensor: Tensor) -> Tensor:
    """Its bytes in a row, uint8: a copy only if it is not contiguous.

    A single element is contiguous with any stride, of which `view` takes 1 alone.
    """
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a CPU tensor; a copy if it is not contiguous."""
    return bytes_of(tensor.detach()).numpy().data


def bit_sums(named: Named) -> dict[str, int]:
    """The sum of the bits of each tensor, by name; if it changes, bits differ. Reads each tensor once."""
    return _numbers(named, _bit_sum)


def changed_bits(before: Mapping[str, int], named: Named) -> list[str]:
    """The names whose bits are others than when `bit_sums` gave `before`."""
    now = bit_sums(named)
    return [name for name, total in before.items() if now.get(name) != total]


def _bit_sum(tensor: Tensor) -> Tensor:
    flat = bytes_of(tensor)
    by_8 = flat.nbytes % 8 == 0 and flat.storage_offset() % 8 == 0  # on a CPU in a fifteenth of the time
    return flat.view(torch.int64 if by_8 else _LANES[min(8, tensor.itemsize)]).sum(dtype=torch.int64)


def bit_hashes(named: Named) -> dict[str, int]:
    """The hash of each tensor, by name: unlike a sum it depends on where each bit is."""
    return _numbers(named, _bit_hash)


def _bit_hash(tensor: Tensor) -> Tensor:
    """64 bits (a scalar on the tensor's device) computed from its bits in memory order.

    Multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2012): the sum mod
    2^64 of 32-bit words, each times a random 64-bit weight. Weights are odd, so a change of a single word is
    always found; any other change is missed with a probability of 2^-32.
    """
    words, weights = words_of(tensor), _weights_on(tensor.device)
    products = torch.empty_like(weights[: len(words)])
    first, *others = (
        products[: len(chunk)].copy_(chunk).mul_(weights[: len(chunk)]).sum()
        for chunk in words.split(len(weights))
    )
    return functools.reduce(lambda total, part: total * _CHAIN + part, others, first)


@functools.cache
def _weights_on(device: torch.device) -> Tensor:
    """The weights of the hash, the same on every rank for any seed."""
    generator = torch.Generator().manual_seed(0)
    size = (_GPU_CHUNK if is_accelerator(device) else _CPU_CHUNK,)
    return torch.randint(-(2**63), 2**63 - 1, size, generator=generator).bitwise_or_(1).to(device)


def words_of(tensor: Tensor) -> Tensor:
    """The bits of `tensor` as one row of integers, in memory order: no copy if it is dense."""
    if tensor.is_sparse:  # SGD's momentum of an embedding with sparse gradients
        tensor = tensor.to_dense()
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return bytes_of(tensor.permute(order)).view(_LANES[min(4, tensor.itemsize)])


def _numbers(named: Named, number: Callable[[Tensor], Tensor]) -> dict[str, int]:
    """The `number` of each tensor, a scalar on its device, read with one wait for each device."""
    numbers = {name: number(tensor.detach()) for name, tensor in named}
    found = dict.fromkeys(numbers, 0)
    for device in {each.device for each in numbers.values()}:
        names = [name for name, each in numbers.items() if each.device == device]
        found |= zip(names, torch.stack([numbers[name] for name in names]).tolist(), strict=True)
    return found
