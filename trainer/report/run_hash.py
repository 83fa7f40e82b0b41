"""The inputs that must be equal on all ranks, and the hash of the final model."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.data.loading.loaders import EvalLoader, TrainLoader
from trainer.distributed.gather_shards import gather_shards_to_rank0
from trainer.failures.heartbeat import beat
from trainer.model.plain_names import model_state
from trainer.tensors.bits import as_bytes


def inputs(model: nn.Module, train_loader: TrainLoader, eval_loader: EvalLoader | None) -> dict[str, Any]:
    """Return, by name, everything apart from the settings that must be equal on all ranks."""
    tensors: dict[str, Tensor] = {f"parameter {name}": value for name, value in model.named_parameters()}
    tensors |= {f"buffer {name}": value for name, value in model.named_buffers()}
    return {
        "the torch version": torch.__version__,
        "the length of the training data": train_loader.num_samples,
        "the order of the training data": train_loader.order_hash(),
        "the length of the validation data": eval_loader.num_samples if eval_loader else 0,
        "torch.get_default_dtype()": str(torch.get_default_dtype()),
        **{name: _described(value) for name, value in tensors.items()},
    }


def _described(tensor: Tensor) -> str:
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{tuple(tensor.shape)} {tensor.dtype}" + (", requires no gradient" if frozen else "")


def parameters_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of the unsharded parameters and buffers in name order (a collective if sharded).

    Models with equal hashes have equal bits, apart from modules' extra state other than tensors. Rank 0
    gathers one shard after another; on other ranks, the return value is meaningless. `model` must not be
    wrapped, so that names in its state dict have no prefix.
    """
    tensors = {name: value for name, value in model_state(model).items() if isinstance(value, Tensor)}
    rank = dist.get_rank()
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        if rank == 0:
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        for part in gather_shards_to_rank0(tensor):
            digest.update(as_bytes(part))
            beat()
    return digest.hexdigest()
