"""A cache changes no token, even beyond the block size; characters are printed when they are complete."""

import pytest
import torch
from torch import Tensor, nn

from models.gpt import GPT
from trainer.data.text.tokenizers import Bytes
from trainer.inference.generate import generate
from trainer.sample import _print


def tokens_of(model: nn.Module, use_cache: bool, **options: object) -> list[int]:
    settings = {"block_size": 16, "vocab_size": 40, "device": torch.device("cpu"), **options}
    generator = torch.Generator().manual_seed(7)
    return list(generate(model, [1, 2, 3], 60, generator=generator, use_cache=use_cache, **settings))  # type: ignore[arg-type]


def test_a_cache_changes_no_token() -> None:
    torch.manual_seed(0)
    model = GPT(50, 16, width=32, depth=2).eval()
    for parameter in model.parameters():  # far from the start, where all tokens are as likely
        parameter.data.mul_(4)
    for options in ({}, {"top_k": 3}, {"temperature": 0.0}, {"temperature": 0.5}):
        cached = tokens_of(model, use_cache=True, **options)
        assert cached == tokens_of(model, use_cache=False, **options)
        assert len(set(cached)) > 2 and max(cached) < 40  # the model knows 50, the tokenizer 40


@torch.no_grad()
def test_logits_in_parts_equal_those_in_one_pass() -> None:
    torch.manual_seed(0)
    model = GPT(50, 16, width=32, depth=2).double().eval()
    tokens = torch.randint(50, (3, 16))
    cache = model.empty_cache()
    parts = [model(tokens[:, :5], cache), *(model(tokens[:, k : k + 1], cache) for k in range(5, 16))]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens))
    with pytest.raises(ValueError, match="a sequence of 17 tokens exceeds block_size=16"):
        model(tokens[:, :1], cache)


class Counts(nn.Module):
    """Predicts each token's successor with certainty; records how many tokens it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.shown.append(tokens.shape[1])
        logits = torch.zeros(*tokens.shape, 40)
        logits.scatter_(2, ((tokens + 1) % 40).unsqueeze(2), 100.0)
        return logits


def test_text_beyond_the_block_size_continues_from_its_last_half() -> None:
    model = Counts()
    assert tokens_of(model, use_cache=False) == [(4 + k) % 40 for k in range(60)]
    assert model.shown[:16] == [*range(3, 17), 8, 9]


def test_characters_are_printed_when_complete(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def tokens() -> list[int]:
        for byte in "€ü".encode() + b"\xff" + "𝄞".encode()[:3]:
            yield byte
            seen.append(capsys.readouterr().out)

    _print(tokens(), list("Ö".encode()), Bytes(), "with")  # type: ignore[arg-type]
    assert seen == ["Ö", "", "€", "", "ü", "", "", "", ""]
    assert capsys.readouterr().out == "��\n"
