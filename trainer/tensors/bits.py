"""Compare, sum and hash the bits of tensors, so that NaN equals itself."""

import functools
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from trainer.accelerator import is_accelerator

_LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Words of 32 bits hashed at a time: 512 KiB of int64 stay in a core's cache, 32 MiB keep a GPU busy.
_CPU_CHUNK, _GPU_CHUNK = 1 << 16, 1 << 22
_CHAIN = 0x2545F4914F6CDD1D  # odd; makes a chunk's hash depend on its position

Named = Iterable[tuple[str, Tensor]]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether both tensors have the same dtype, shape and bits; NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(bytes_of(one), bytes_of(other))


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor` as a 1-D uint8 tensor: a copy only if it is not contiguous.

    A single element is contiguous with any stride, but `view` requires stride 1.
    """
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a CPU tensor; a copy if it is not contiguous."""
    return bytes_of(tensor.detach()).numpy().data


def bit_sums(named: Named) -> dict[str, int]:
    """Return, by name, the sum of each tensor's bits as integers; a change of any one element changes it."""
    return _numbers(named, bit_sum)


def changed_bits(before: Mapping[str, int], named: Named) -> list[str]:
    """Return the names of tensors whose bits have changed since `bit_sums` returned `before`."""
    now = bit_sums(named)
    return [name for name, total in before.items() if now.get(name) != total]


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of the tensor's bits as integers, modulo 2^64, as a scalar on its device."""
    flat = bytes_of(tensor)
    by_8 = flat.nbytes % 8 == 0 and flat.storage_offset() % 8 == 0  # 15 times as fast on a CPU
    return flat.view(torch.int64 if by_8 else _LANES[min(8, tensor.itemsize)]).sum(dtype=torch.int64)


def bit_hashes(named: Named) -> dict[str, int]:
    """Return a hash of each tensor, by name. Unlike a sum, a hash depends on the position of each bit."""
    return _numbers(named, bit_hash)


def bit_hash(tensor: Tensor) -> Tensor:
    """Return a 64-bit hash of the tensor's bits in memory order, as a scalar on its device.

    Multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2012): the sum mod
    2^64 of 32-bit words, each multiplied by a random 64-bit weight. Weights are odd, so a change of a single
    word is always detected; any other change is missed with a probability of 2^-32.
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
    """Return the weights of the hash, which are the same on every rank and independent of the run's seed."""
    generator = torch.Generator().manual_seed(0)
    size = (_GPU_CHUNK if is_accelerator(device) else _CPU_CHUNK,)
    return torch.randint(-(2**63), 2**63 - 1, size, generator=generator).bitwise_or_(1).to(device)


def words_of(tensor: Tensor) -> Tensor:
    """Return the bits of `tensor` as a 1-D tensor of integers in memory order; not copied if dense."""
    if tensor.is_sparse:  # SGD's momentum of an embedding with sparse gradients
        tensor = tensor.to_dense()
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return bytes_of(tensor.permute(order)).view(_LANES[min(4, tensor.itemsize)])


def _numbers(named: Named, number: Callable[[Tensor], Tensor]) -> dict[str, int]:
    """Return `number(tensor)`, a scalar, for each tensor as an int, with one synchronization per device."""
    scalars = {name: number(tensor.detach()) for name, tensor in named}
    numbers = dict.fromkeys(scalars, 0)
    for device in {scalar.device for scalar in scalars.values()}:
        names = [name for name, scalar in scalars.items() if scalar.device == device]
        numbers |= zip(names, torch.stack([scalars[name] for name in names]).tolist(), strict=True)
    return numbers
