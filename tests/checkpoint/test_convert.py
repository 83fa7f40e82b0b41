"""show, verify and convert: every form holds the same tensors, and a run goes on from each."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import tiny
from tests.ranks import run_ranks
from trainer.checkpoint import convert as convert_module
from trainer.checkpoint import load_weights
from trainer.checkpoint.__main__ import main
from trainer.checkpoint.source import Source
from trainer.checkpoint.store import verify

STEP = "checkpoints/step_00000003"


def _save(run_dir: Path, format: str) -> dict[str, Any]:
    state = tiny.train_state(sharded=True)
    tiny.train(state, 3)
    tiny.checkpointer(run_dir, format=format).save(state, {"eval/loss": 0.25})
    return tiny.everything(state)


def _restore(path: Path) -> dict[str, Any]:
    state = tiny.train_state(sharded=True, seed=4)
    tiny.restore(tiny.checkpointer(path.parent / "run"), state, str(path))
    return tiny.everything(state)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["full", "sharded"])
@pytest.mark.parametrize("format", ["full", "sharded"])
def test_a_run_goes_on_from_what_was_converted(
    tmp_path: Path, format: str, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_module, "PORTION_BYTES", 200)  # several portions even of a tiny model
    saved = run_ranks(_save, 2, tmp_path, format)[0]
    assert main(["convert", str(tmp_path / STEP), str(tmp_path / "out"), "--to", to]) == 0
    assert verify(tmp_path / "out").format == to
    tiny.assert_same(run_ranks(_restore, 2, tmp_path / "out")[0], saved)
    if to == "sharded":
        assert len(list((tmp_path / "out").glob("*.distcp"))) > 3
    assert not list(tmp_path.glob(".tmp_*"))


@pytest.mark.parametrize("to", ["torch", "safetensors"])
@pytest.mark.parametrize("format", ["full", "sharded"])
def test_weights_alone_can_be_taken_elsewhere(tmp_path: Path, format: str, to: str) -> None:
    if to == "safetensors":
        pytest.importorskip("safetensors")
    saved = run_ranks(_save, 2, tmp_path, format)[0]
    out = tmp_path / f"weights.{to}"
    assert main(["convert", str(tmp_path / STEP), str(out), "--to", to]) == 0
    net = tiny.Net()
    load_weights(net, out)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, saved["tensors"][f"model.{name}"])
    if to == "torch":
        tiny.Net().load_state_dict(torch.load(out, weights_only=True))


def test_show_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(_save, 2, tmp_path, "sharded")
    assert main(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for expected in ("whole", "step          3 (epoch 0, sample 36)", "test on 2 ranks", "eval/loss 0.25"):
        assert expected in shown
    assert main(["verify", str(tmp_path / STEP)]) == 0
    shard = tmp_path / STEP / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    capsys.readouterr()
    assert main(["verify", str(tmp_path)]) == 2
    assert "DAMAGED" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / STEP), str(tmp_path / "out"), "--to", "full"]) == 2
    assert "sha256 of __1_0.distcp" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_says_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(_save, 1, tmp_path, "full")
    (tmp_path / "there").mkdir()
    assert main(["convert", str(tmp_path / STEP), str(tmp_path / "there"), "--to", "full"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["show", str(tmp_path / "there")]) == 2
    assert "holds none" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    assert "no checkpoint" in capsys.readouterr().out


def _convert_big(source: str, out: str) -> int:
    """How many bytes more its conversion needed than its imports."""
    convert_module.PORTION_BYTES = 64 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["convert", source, out, "--to", "sharded"]) == 0
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def _save_big(run_dir: Path) -> None:
    """400 MB in 50 tensors."""
    state = tiny.train_state()
    state.model = torch.nn.ParameterList([torch.full((2_000_000,), k / 3) for k in range(50)])
    state.optimizer = torch.optim.SGD(state.model.parameters())
    tiny.checkpointer(run_dir, format="sharded").save(state)


@pytest.mark.slow
def test_sharded_to_sharded_in_bounded_memory(tmp_path: Path) -> None:
    run_ranks(_save_big, 2, tmp_path)
    source, out = tmp_path / "checkpoints" / "step_00000000", tmp_path / "out"
    extra_mb = run_ranks(_convert_big, 1, str(source), str(out), init=False)[0] / 2**20
    assert extra_mb < 250, f"{extra_mb} MB for portions of 64 MB"
    a, b = Source.open(source), Source.open(out)
    assert a.shapes == b.shapes and len(a.shapes) == 50
    for name in ("model.0", "model.49"):
        assert torch.equal(a.read(name)[""], b.read(name)[""])
    assert len(list(out.glob("*.distcp"))) > 1
