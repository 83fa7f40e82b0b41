"""Attention within packed documents, with FlashAttention if possible, and otherwise with a mask.

FlashAttention gets the offsets of the documents, and skips pairs of tokens in different documents. With a
mask, torch uses its memory-efficient kernel, which computes all pairs.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def takes_varlen(x: Tensor, head_size: int, dropout: float) -> bool:
    """Return whether FlashAttention supports packed documents of tokens like ``x`` (B, T, width).

    It needs an NVIDIA GPU of Ampere or newer, and fp16 or bf16, and does not support dropout. Compiled models
    use the mask, because the number of documents would be a shape that changes in each step. Fake tensors,
    with which FLOPs are counted, use the mask, too.
    """
    if x.device.type != "cuda" or type(x) is not Tensor or dropout or torch.version.hip:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    fits = dtype in (torch.float16, torch.bfloat16) and head_size % 8 == 0 and head_size <= 192
    allowed = torch.backends.cuda.flash_sdp_enabled() and not torch.compiler.is_compiling()
    return fits and allowed and torch.cuda.get_device_capability(x.device) >= (8, 0)


def documents(tokens: Tensor, border: int, varlen: bool) -> tuple[Tensor, Tensor]:
    """Return positions of tokens (B, T) within their documents, and the causal structure of the attention.

    Each document in ``tokens`` (B, T) ends with ``border``. The structure is a mask (B, 1, T, T) or, with
    ``varlen``, the int32 offsets of the documents in the B * T tokens, followed by B * T, for
    `attend_within`. The host waits for the GPU to get the number of documents, because an array for the
    maximum number would cost more: for each document, even an empty one, torch's kernel allocates 128 rows of
    gradients in fp32 and starts blocks of threads.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    starts = F.pad(tokens == border, (1, 0), value=True)[:, :-1]  # each sequence starts with a document
    first = torch.where(starts, positions, 0).cummax(dim=1).values  # the start of each token's document
    if varlen:
        return positions - first, F.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=tokens.numel()).int()
    query, key = positions[:, None], positions
    return positions - first, ((key <= query) & (key >= first[:, :, None]))[:, None]


def attend_within(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor) -> Tensor:
    """Compute causal attention within documents, for query, key and value (B, T, heads, size).

    Gradients are deterministic only with `torch.use_deterministic_algorithms`, which train.exact sets.

    Args:
        offsets: from `documents` with ``varlen=True``.
    """
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler, which takes 3 s

    longest = query.shape[1]  # upper bound of a document's length
    flat = [part.flatten(0, 1) for part in (query, key, value)]
    output = varlen_attn(flat[0], flat[1], flat[2], offsets, offsets, longest, longest, window_size=(-1, 0))
    assert isinstance(output, Tensor)
    return output.view_as(query)
