"""Packed documents with `border`: each has the same outputs as a separate sequence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from models.gpt import GPT
from models.packed import takes_varlen
from tests.runs import settings
from trainer.build.model import build_model
from trainer.data.text.in_memory import Text
from trainer.data.text.tokens import Tokens
from trainer.data.text.windows import Windows
from trainer.errors import UserError
from trainer.tasks import LanguageModelling

END = 0
DOCUMENTS = ([5, 9, 3, END], [END], [7, 7, 2, 8, 4, END], [6, 1])  # 13 tokens; the last goes on elsewhere


def gpt(**kwargs: int) -> GPT:
    torch.manual_seed(0)
    return GPT(11, 16, **kwargs).eval()


def packed() -> torch.Tensor:
    return torch.tensor([[token for document in DOCUMENTS for token in document]])


@pytest.mark.parametrize("head", ["logits", "loss"])
def test_the_loss_equals_that_of_separate_documents(head: str) -> None:
    task, plain = LanguageModelling(None, head=head), gpt()
    [tokens] = packed()
    batch = Windows(tokens.numpy(), len(tokens) - 1, 11, border=END).__getitems__([0])
    losses = [
        F.cross_entropy(plain(torch.tensor([document]))[0, :-1], torch.tensor(document[1:]), reduction="sum")
        for document in DOCUMENTS
        if len(document) > 1
    ]
    assert task.weight(batch) == sum(len(document) - 1 for document in DOCUMENTS) == 9
    torch.testing.assert_close(task.loss(gpt(border=END), batch), sum(losses) / 9)


def test_logits_of_a_packed_document_equal_those_of_the_document_alone() -> None:
    model, plain = gpt(border=END), gpt()
    logits = torch.cat([plain(torch.tensor([document])) for document in DOCUMENTS], dim=1)
    torch.testing.assert_close(model(packed()), logits, rtol=0, atol=1e-5)
    assert (plain(packed()) - logits).abs().max() > 1e-2, "without borders they see each other"


def twin(query: Tensor, key: Tensor, value: Tensor, *rest: Any, window_size: tuple[int, int]) -> Tensor:
    """Compute attention document by document, like FlashAttention, and also call torch's function on `meta`."""
    begins, same, longest, longest_key = rest
    shapes = [part.detach().to("meta", torch.bfloat16).requires_grad_() for part in (query, key, value)]
    begun = begins.to("meta")
    varlen_attn(*shapes, begun, begun, longest, longest_key, window_size=window_size).sum().backward()
    lengths = begins.diff().tolist()
    assert same is begins and begins.dtype == torch.int32 and begins[0] == 0 and sum(lengths) == len(query)
    assert min(lengths) > 0 and max(lengths) <= longest == longest_key and window_size == (-1, 0)
    assert all(part.stride(-1) == 1 and part.shape[1:] == (4, 32) for part in (query, key, value))
    split = (part.transpose(0, 1).split(lengths, dim=1) for part in (query, key, value))
    mixed = [F.scaled_dot_product_attention(*three, is_causal=True) for three in zip(*split, strict=True)]
    return torch.cat(mixed, dim=1).transpose(0, 1).contiguous()


def test_flash_attention_equals_the_mask_in_logits_and_gradients(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", twin)
    one, every = torch.full((1, 13), 7), torch.full((1, 13), END)
    ends = torch.tensor([[END, *[5] * 11, END]])
    tokens, found = torch.cat([packed(), one, every, ends, packed().flip(1)]), []
    for way in (False, True):
        monkeypatch.setattr("models.gpt.takes_varlen", lambda *_, way=way: way)
        logits = (model := gpt(border=END))(tokens)
        logits.square().sum().backward()
        found.append([logits, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-3)


def test_flash_attention_is_used_where_torchs_kernel_supports_it(monkeypatch: MonkeyPatch) -> None:
    """On a simulated GPU; `benchmarks/gpu.sh packed` compares both on a real one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not takes_varlen(torch.ones(1, dtype=torch.bfloat16), 64, 0.0)
    with FakeTensorMode():
        whole, half = (torch.ones(1, dtype=dtype, device="cuda") for dtype in (torch.float32, torch.float16))
    assert not takes_varlen(half, 64, 0.0), "no numbers to count documents in: their FLOPs are counted"
    monkeypatch.setattr("models.packed.Tensor", type(half))
    inputs = ((half, 64, 0.0), (whole, 64, 0.0), (half, 20, 0.0), (half, 64, 0.1))
    assert [takes_varlen(*each) for each in inputs] == [True, False, False, False]
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    assert takes_varlen(whole, 64, 0.0)


def test_every_source_of_tokens_keeps_borders(tmp_path: Path) -> None:
    tokens = np.tile(np.array([5, 9, 3, 10], np.uint16), 10)
    tokens.tofile(tmp_path / "train.bin")
    (tmp_path / "text").write_bytes(bytes(tokens.astype(np.uint8)))
    sources = (
        Tokens("train", str(tmp_path), 8, vocab_size=11, border=10)[0],
        Text("train", str(tmp_path / "text"), 8, eval_fraction=0.5, border=10)[0],
    )
    for given, targets in sources:
        assert targets.tolist() == [9, 3, 10, -100, 9, 3, 10, -100], given


def test_borders_that_the_model_ignores_are_refused(tmp_path: Path) -> None:
    config = settings("experiment=text_gpt", "data.dataset.border=10")
    assert config.model["border"] == 10 and settings("experiment=text_gpt").model["border"] is None
    windows = Windows(np.arange(9), 4, 11, border=10)
    with pytest.raises(UserError, match=r"border=10, but model.border=None"):
        build_model({"_target_": "models.gpt.GPT", "vocab_size": 11, "block_size": 4}, windows)
    with pytest.raises(
        ValueError, match="border=11: expected the ID of the token that ends documents, 0 to 10"
    ):
        gpt(border=11)
    with pytest.raises(ValueError, match="a key-value cache is not supported"):
        gpt(border=END)(packed(), gpt().empty_cache())
