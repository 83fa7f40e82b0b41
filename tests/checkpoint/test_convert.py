"""Commands show, verify and convert: every format contains the same tensors."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoint import tiny
from tests.ranks import run_ranks
from trainer.checkpoint.__main__ import main

STEP = "checkpoints/step_00000003"


def _save(run_dir: Path) -> dict[str, Tensor]:
    state = tiny.train_state(sharded=True)
    tiny.train(state, 3)
    checkpointer = tiny.checkpointer(run_dir, format="sharded", state=state)
    checkpointer.record_evaluation(3, {"eval/loss": 0.25})
    checkpointer.save(state)
    return tiny.everything(state)["tensors"]


Saved = tuple[Path, dict[str, Tensor]]  # a run directory, and the tensors of its checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    run_dir = tmp_path_factory.mktemp("saved")
    return run_dir, run_ranks(_save, 2, run_dir)[0]


@pytest.mark.parametrize(("to", "named"), [("safetensors", STEP), ("torch", STEP), ("torch", ".")])
def test_weights_can_be_exported(tmp_path: Path, saved: Saved, to: str, named: str) -> None:
    """Those of a run are the weights of its newest checkpoint."""
    (run_dir, tensors), out = saved, tmp_path / f"weights.{to}"
    assert main(["convert", str(run_dir / named), str(out), "--to", to]) == 0
    net = tiny.Net()
    tiny.load_weights(net, out)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, tensors[f"model.{name}"])
    if to == "torch":
        tiny.Net().load_state_dict(torch.load(out, weights_only=True))


class _Config:
    """The part of a transformers config that the test uses."""

    model_type = "played"

    def to_json_string(self) -> str:
        return json.dumps({"model_type": "played", "dtype": "float64", "tie_word_embeddings": True})


def test_show_and_verify(tmp_path: Path, saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(saved[0], tmp_path, symlinks=True, dirs_exist_ok=True)
    assert main(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for expected in ("intact", "step          3 (epoch 0, sample 36)", "test on 2 ranks", "eval/loss 0.25"):
        assert expected in shown
    assert main(["verify", str(tmp_path / STEP)]) == 0
    shard = tmp_path / STEP / "model-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    capsys.readouterr()
    assert main(["verify", str(tmp_path)]) == 2
    assert "DAMAGED" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / STEP), str(tmp_path / "out"), "--to", "torch"]) == 2
    assert "sha256 of model-00001-of-00002.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tied_weight_stays_tied_for_torch_and_is_written_twice_otherwise(tmp_path: Path) -> None:
    run_ranks(_save_tied, 2, tmp_path)
    directory = tmp_path / "checkpoints" / "step_00000000"
    header = load_file(directory / "model-00000-of-00001.safetensors")
    assert sorted(header) == ["a.bias", "a.weight", "b.bias"], "written once"
    for to, read in (("torch", torch.load), ("safetensors", load_file)):
        assert main(["convert", str(directory), str(tmp_path / to), "--to", to]) == 0
        weights = read(tmp_path / to)
        assert weights["a.weight"].equal(weights["b.weight"]) and weights["a.weight"].equal(
            header["a.weight"]
        )
        assert (weights["a.weight"].data_ptr() == weights["b.weight"].data_ptr()) == (to == "torch")
    out = tmp_path / "hf"
    assert main(["convert", str(directory), str(out), "--to", "hf", "--dtype", "bf16"]) == 0
    theirs = load_file(out / "model.safetensors")
    assert {name: value.dtype for name, value in theirs.items()} == dict.fromkeys(header, torch.bfloat16)
    assert json.loads((out / "config.json").read_text()) == {
        "model_type": "played",
        "architectures": ["_Tied"],
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    }


class _Tied(torch.nn.Module):
    base_model_prefix = "played"  # as each class of transformers has one

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.config = _Config()


def _save_held(run_dir: Path) -> None:
    held = torch.nn.Sequential(_Tied())
    adapted = _Tied()
    adapted.a = torch.nn.ModuleDict({"base_layer": adapted.a})
    for name, model in {"held": held, "adapted": adapted}.items():
        tiny.checkpointer(run_dir / name, state=(state := tiny.state_of(model, "sgd"))).save(state)


def test_a_wrapped_transformers_model_is_not_exported_to_hf(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(_save_held, 1, tmp_path)
    for name in ("held", "adapted"):
        saved = str(tmp_path / name / "checkpoints" / "step_00000000")
        assert main(["convert", saved, str(tmp_path / "hf"), "--to", "hf"]) == 2
        assert "step_00000000 contains a model that from_pretrained could not load" in capsys.readouterr().err
        assert main(["convert", saved, str(tmp_path / "peft"), "--to", "peft"]) == 2
        assert (
            "step_00000000 contains no PEFT adapters; its run did not set model.adapters"
            in capsys.readouterr().err
        )
        assert not (tmp_path / "hf").exists() and not (tmp_path / "peft").exists()
        assert main(["convert", saved, str(tmp_path / name / "w"), "--to", "safetensors"]) == 0


def _save_tied(run_dir: Path) -> None:
    torch.manual_seed(3)
    state, other = tiny.state_of(_Tied(), "sgd"), tiny.state_of(_Tied(), "sgd")
    tiny.checkpointer(run_dir, state=state).save(state)
    assert tiny.restore(tiny.checkpointer(run_dir), other, "auto")
    assert other.model.b.weight.equal(state.model.b.weight) and other.model.b.weight is other.model.a.weight
