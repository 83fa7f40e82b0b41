"""Sparse gradients of embeddings: which parameters have them, and their size.

DDP asks each embedding for `sparse` when it is constructed, and gives every such parameter its own bucket.
Its gradient has other indices, and another length, on each rank and at each step: only a backend supports it.
"""

from torch import Tensor, nn


def sparse_parameters(model: nn.Module) -> list[str]:
    """The names of the parameters whose gradients DDP takes to be sparse."""
    return [
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.sparse
        and module.weight.requires_grad
    ]


def refuse_sparse(model: nn.Module, by: str, instead: str) -> None:
    """
    Raises:
        ValueError: `by` cannot add sparse gradients; names their parameters, and what to use `instead`.
    """
    if names := sparse_parameters(model):
        raise ValueError(
            f"{by} adds up dense gradients, but those of {', '.join(names)} are sparse; use {instead}, or "
            "build the embedding with sparse=False"
        )


def unforeseen(model: nn.Module) -> list[str]:
    """The names of the parameters with a sparse gradient for which DDP expects a dense one."""
    foreseen = sparse_parameters(model)
    gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return [name for name, grad in gradients if grad is not None and grad.is_sparse and name not in foreseen]


def num_bytes(gradients: Tensor) -> int:
    """Bytes of a gradient; of a sparse one, its values and indices before equal indices are merged."""
    if not gradients.is_sparse:
        return gradients.nbytes
    return gradients._values().nbytes + gradients._indices().nbytes  # the public methods need merged indices
