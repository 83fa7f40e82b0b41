"""Hugging Face models: from_pretrained loads converted checkpoints, and runs start from saved folders."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.checkpoint import tiny
from tests.ranks import run_ranks
from trainer.checkpoint.__main__ import main
from trainer.model.trainable_parameters import TrainableParameters
from trainer.state.train_state import Progress, TrainState

transformers: Any = pytest.importorskip(
    "transformers", reason="pip install 'ringmaster-trainer[transformers]'"
)

TOKENS = torch.arange(12).reshape(2, 6)
KINDS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8,
        )
    ),
}


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    return model.eval()(TOKENS).logits


def _train(run_dir: Path, kind: str) -> tuple[Tensor, Tensor]:
    """Train two steps, save, and return the logits of the weights and of their averages."""
    torch.manual_seed(2)
    model: nn.Module = KINDS[kind]()
    if kind == "llama":
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    trained = TrainableParameters(model)
    optimizer = torch.optim.AdamW(trained.own.values(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    state = TrainState(trained, optimizer, schedule, scaler, Progress())
    state.keep_average(0.5, warmup=False)
    checkpointer = tiny.checkpointer(run_dir, format="sharded" if kind == "llama" else "full", state=state)
    for _ in range(2):
        model(TOKENS).logits.square().mean().backward()
        trained.attach_gradients()
        optimizer.step()
        state.update_average()
        trained.drop_gradients()
        state.progress.advance(12, 48)
    checkpointer.save(state)
    assert state.average is not None
    logits = _logits(model)
    with state.average.in_place():
        if isinstance(model, FSDPModule):
            model.reshard()  # it still holds the weights gathered
        return logits, _logits(model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_from_pretrained_of_a_converted_checkpoint_gives_the_runs_logits(tmp_path: Path, kind: str) -> None:
    logits, averaged = run_ranks(_train, 2 if kind == "llama" else 1, tmp_path, kind)[0]
    assert (logits - averaged).abs().max() > 1e-3
    saved, their_class = str(tmp_path / "checkpoints" / "step_00000002"), type(KINDS[kind]())
    for name, options, expected, tolerance in (
        ("single", [], logits, 1e-6),
        ("averages", ["--ema"], averaged, 1e-6),
        ("short", ["--dtype", "bf16"], logits, 0.05),
    ):
        out = tmp_path / name
        assert main(["convert", saved, str(out), "--to", "hf", *options]) == 0
        for of in (their_class, transformers.AutoModelForCausalLM):
            model, found = of.from_pretrained(out, output_loading_info=True)
            assert not found["missing_keys"] and not found["unexpected_keys"]
            assert type(model) is their_class and model.config.architectures == [their_class.__name__]
            assert model.dtype == (torch.bfloat16 if name == "short" else torch.float32)
            torch.testing.assert_close(_logits(model).float(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_starts_from_a_hugging_face_folder(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = KINDS[kind]()
    theirs.save_pretrained(tmp_path / "single")
    theirs.save_pretrained(tmp_path / "split", max_shard_size="4KB")
    assert (tmp_path / "split" / "model.safetensors.index.json").exists()
    for folder in ("single", "split"):
        ours = KINDS[kind]()
        with caplog.at_level(logging.WARNING):
            tiny.load_weights(ours, tmp_path / folder)
        assert _logits(ours).equal(_logits(theirs))
    assert "left as initialized" not in caplog.text, "the head of GPT-2 is tied, and is not in their file"
    theirs.base_model.save_pretrained(tmp_path / "without_head")
    ours = KINDS[kind]()
    tiny.load_weights(ours, tmp_path / "without_head")
    parameters = zip(ours.base_model.parameters(), theirs.base_model.parameters(), strict=True)
    assert all(map(torch.equal, *zip(*parameters, strict=True)))
