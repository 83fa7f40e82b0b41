"""model.init_from: weights that others saved."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint import tiny
from tests.ranks import run_ranks
from trainer.checkpoint import load_weights
from trainer.errors import UserError


def _same(a: nn.Module, b: nn.Module) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def _nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    return tiny.Net(), tiny.Net()


@pytest.mark.parametrize("container", [None, "model", "state_dict"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_reads_plain_and_ddp_state_dicts(tmp_path: Path, prefix: str, container: str | None) -> None:
    theirs, ours = _nets()
    saved = {prefix + name: tensor for name, tensor in theirs.state_dict().items()}
    torch.save({container: saved, "epoch": 3} if container else saved, tmp_path / "w.pt")
    assert not _same(theirs, ours)
    load_weights(ours, tmp_path / "w.pt")
    assert _same(theirs, ours)


def test_lists_what_is_missing_and_what_is_left_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, ours = _nets()
    before = ours.state_dict()["first.bias"].clone()
    saved = dict(theirs.state_dict())
    saved["head.weight"] = saved.pop("first.bias")
    torch.save(saved, tmp_path / "w.pt")
    with caplog.at_level(logging.WARNING):
        load_weights(ours, tmp_path / "w.pt")
    assert "lacks first.bias" in caplog.text
    assert "also holds head.weight" in caplog.text
    assert torch.equal(ours.state_dict()["first.bias"], before)
    assert torch.equal(ours.state_dict()["second.weight"], saved["second.weight"])


def test_refuses_other_shapes_and_touches_nothing(tmp_path: Path) -> None:
    ours = tiny.Net(7)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    torch.save(tiny.Net(8).state_dict(), tmp_path / "w.pt")
    with pytest.raises(UserError, match=r"first.weight \(\[8, 5\] there, \[7, 5\] here\).* and 2 more"):
        load_weights(ours, tmp_path / "w.pt")
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


def test_refuses_what_is_no_state_dict(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_weights(tiny.Net(), tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(UserError, match="no file of plain tensors"):
        load_weights(tiny.Net(), tmp_path / "text.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(UserError, match="holds no named tensors, but a list"):
        load_weights(tiny.Net(), tmp_path / "list.pt")
    torch.save({"a": torch.ones(1)}, tmp_path / "foreign.pt")
    with pytest.raises(UserError, match="no name in common"):
        load_weights(tiny.Net(), tmp_path / "foreign.pt")


def test_reads_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    theirs, ours = _nets()
    safetensors.save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    load_weights(ours, tmp_path / "w.safetensors")
    assert _same(theirs, ours)
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="not readable as safetensors"):
        load_weights(ours, tmp_path / "w.safetensors")


def _save_and_load(run_dir: Path, format: str) -> bool:
    state = tiny.train_state(sharded=format == "sharded")
    tiny.train(state, 2)
    tiny.checkpointer(run_dir, format=format).save(state)
    fresh = tiny.Net()
    load_weights(fresh, run_dir / "checkpoints" / "latest")
    saved = tiny.everything(state)["tensors"]
    return all(torch.equal(tensor, saved[f"model.{name}"]) for name, tensor in fresh.state_dict().items())


@pytest.mark.parametrize("format", ["full", "sharded"])
def test_reads_our_checkpoints(tmp_path: Path, format: str) -> None:
    assert run_ranks(_save_and_load, 2, tmp_path, format)[0]
