"""Packed documents that do not attend to each other: by FlashAttention if it applies, otherwise by a mask.

FlashAttention is given where each document begins, so it computes nothing for pairs of tokens of different
documents. It takes no mask: with one torch takes its memory-efficient kernel, which computes them all.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def takes_varlen(x: Tensor, head_size: int, dropout: float) -> bool:
    """Whether FlashAttention computes packed documents of tokens like ``x`` (B, T, width).

    It needs an NVIDIA GPU since Ampere and fp16 or bf16, and it drops nothing. A compiled model keeps the
    mask, because the number of documents would be a shape that changes in each step. So do tensors that only
    have shapes, of which FLOPs are counted.
    """
    if x.device.type != "cuda" or type(x) is not Tensor or dropout or torch.version.hip:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    fits = dtype in (torch.float16, torch.bfloat16) and head_size % 8 == 0 and head_size <= 192
    allowed = torch.backends.cuda.flash_sdp_enabled() and not torch.compiler.is_compiling()
    return fits and allowed and torch.cuda.get_device_capability(x.device) >= (8, 0)


def documents(tokens: Tensor, border: int, varlen: bool) -> tuple[Tensor, Tensor]:
    """For packed documents (B, T), each ended by ``border``: the places of tokens in their documents (B, T),
    and which tokens attend to which, causal within each.

    That is a mask (B, 1, T, T). With ``varlen`` it is where documents begin in the B * T tokens, and their
    end, int32, for `attend_within`. The host then waits for the GPU, to learn how many there are. An array
    that fits any number would cost more: torch's kernel allocates 128 rows of gradients in fp32 for each
    document, also for an empty one, and begins blocks of threads for each; it takes at most 65,535.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    begins = F.pad(tokens == border, (1, 0), value=True)[:, :-1]  # each sequence begins with one
    first = torch.where(begins, places, 0).cummax(dim=1).values  # the begin of each token's document
    if varlen:
        return places - first, F.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=tokens.numel()).int()
    query, key = places[:, None], places
    return places - first, ((key <= query) & (key >= first[:, :, None]))[:, None]


def attend_within(query: Tensor, key: Tensor, value: Tensor, begins: Tensor) -> Tensor:
    """Causal attention within the documents that ``begins`` tells, of (B, T, heads, size) each.

    As for torch's other fused kernels, the gradient's bits are the same each time only under
    `torch.use_deterministic_algorithms`, which train.exact sets.
    """
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler, which takes 3 s

    longest = query.shape[1]  # at most
    flat = [part.flatten(0, 1) for part in (query, key, value)]
    mixed = varlen_attn(flat[0], flat[1], flat[2], begins, begins, longest, longest, window_size=(-1, 0))
    assert isinstance(mixed, Tensor), "only this was asked for"
    return mixed.view_as(query)
