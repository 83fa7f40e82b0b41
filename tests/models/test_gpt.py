from typing import Any

import pytest
import torch
from torch.nn import functional as F

from models.gpt import GPT
from trainer.tasks import LanguageModelling


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
def test_gpt2_has_the_parameter_count_of_openais() -> None:
    with torch.device("meta"):
        assert num_parameters(GPT(50257, 1024, "gpt2")) == 124_439_808
        assert num_parameters(GPT(50257, 1024, "gpt2-xl")) == 1_557_611_200


def test_a_later_token_does_not_change_earlier_logits() -> None:
    torch.manual_seed(0)
    model = GPT(256, 16).eval()
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 16, 256)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=(0, 2)).min() > 1e-4


def test_gpt2_initialisation() -> None:
    torch.manual_seed(0)
    model = GPT(256, 64, width=256, depth=8, num_heads=4)
    block = model.blocks[3]
    assert model.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attention.query_key_value.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.feed_forward[-1].weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.feed_forward[0].bias.abs().sum() == 0


def loss_and_gradient(head: str, precision: str = "fp32", **options: Any) -> tuple[float, torch.Tensor, Any]:
    torch.manual_seed(0)
    model = GPT(50, 16, **options)
    tokens = torch.randint(50, (4, 17))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        task = LanguageModelling(head=head)
        loss = task.loss(model, (tokens[:, :-1], tokens[:, 1:]))
    loss.backward()
    gradient = model.token_embedding.weight.grad
    assert gradient is not None
    return loss.item(), gradient, model


def test_a_padded_vocabulary_changes_no_result() -> None:
    plain, plain_gradient, _ = loss_and_gradient("logits")
    for head in ("logits", "loss", *(["chunks"] if hasattr(F, "linear_cross_entropy") else [])):
        loss, gradient, model = loss_and_gradient(head, vocab_multiple=64)
        assert model(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 50)
        assert loss == pytest.approx(plain, rel=1e-6)
        torch.testing.assert_close(gradient, plain_gradient, rtol=1e-4, atol=1e-7)
        assert model.state_dict().keys() == GPT(50, 16).state_dict().keys()
        assert model.token_embedding.weight.shape == (50, 128)
        half, half_gradient, _ = loss_and_gradient(head, "bf16", vocab_multiple=64)
        assert half == pytest.approx(plain, rel=5e-3)
        assert (half_gradient - plain_gradient).norm() < 0.02 * plain_gradient.norm()
