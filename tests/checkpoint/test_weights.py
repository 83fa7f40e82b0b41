"""model.init_from: weights that other programs saved."""

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

from tests.checkpoint import tiny
from tests.ranks import run_ranks
from trainer.checkpoint.weights import weights_for
from trainer.errors import UserError


def _same(a: nn.Module, b: nn.Module) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def _nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    return tiny.Net(), tiny.Net()


@pytest.mark.parametrize(
    ("container", "prefix"),
    [
        (None, ""),
        (None, "module."),
        ("model", "module._orig_mod."),
        ("state_dict", "model."),
        ("params_ema", ""),
        ("teacher", "module.backbone."),
    ],
)
def test_reads_state_dicts_of_wrapped_models_in_any_container(
    tmp_path: Path, container: str | None, prefix: str
) -> None:
    theirs, ours = _nets()
    saved = {prefix + name: tensor for name, tensor in theirs.state_dict().items()}
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}}
    torch.save({container: saved, "epoch": 3, "o": optimizer} if container else saved, tmp_path / "w.pt")
    assert not _same(theirs, ours)
    tiny.load_weights(ours, tmp_path / "w.pt")
    assert _same(theirs, ours)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("a._orig_mod.b._checkpoint_wrapped_module.c", "a.b.c"),
        ("a.b.c", "a.b.base_layer.c"),
        ("saved.net.a.b.c", "a.b.c"),
        ("a.b.c", "base_model.model.a.b.c"),
        ("saved.a.b.c", "transformer.a.b.c"),
        ("module.c", "module.c"),
    ],
)
def test_name_parts_of_wrappers_and_one_prefix_are_ignored(tmp_path: Path, theirs: str, ours: str) -> None:
    model, there = nn.Module(), nn.Module()
    for names, module in ((ours, model), (theirs, there)):
        *path, last = names.split(".")
        for part in path:
            module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.rand(3)))
    tiny.load_weights(model, _saved(tmp_path, there.state_dict()))
    assert _same(model, there)


def test_ambiguous_prefixes_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    student, ours = _nets()
    teacher = {f"backbone.{name}": tensor + 1 for name, tensor in student.state_dict().items()}
    path = _saved(tmp_path, {"student": student.state_dict(), "teacher": teacher})
    with pytest.raises(
        UserError, match=r"equally well in several ways: student for the model, teacher\.backbone for"
    ):
        tiny.load_weights(ours, path)
    with pytest.raises(
        UserError, match=r"model\.init_key=pupil is not in .*, which contains student, teacher"
    ):
        weights_for(ours, path, key="pupil")
    with caplog.at_level(logging.INFO):
        found = weights_for(ours, path, key="teacher")
    assert all(found[name].equal(teacher[f"backbone.{name}"]) for name in ours.state_dict())
    assert "10 of the model's 10 tensors, from names under teacher.backbone; not used: student" in caplog.text
    two = nn.ModuleDict({"left": tiny.Net(), "right": tiny.Net()})
    with pytest.raises(
        UserError, match=r"all names for left, all names for right; .*model\.init_ignore to skip a part"
    ):
        tiny.load_weights(two, path := _saved(tmp_path, student.state_dict()))
    tiny.load_weights(two, path, ["left"])
    assert _same(two["right"], student)


def test_a_frozen_parameter_without_weights_is_refused(tmp_path: Path) -> None:
    theirs, ours = _nets()
    kept = {name: value for name, value in theirs.state_dict().items() if not name.startswith("second.")}
    path = _saved(tmp_path, kept)
    words = r"second.bias, second.weight would keep random values, .*change model.freeze"
    for ignore in ((), "second"):
        with pytest.raises(UserError, match=words):
            weights_for(ours, path, ignore, freeze=["^second"])
    ours.second.weight.requires_grad_(False)
    with pytest.raises(UserError, match=r"second.weight would keep .*add them to model\.init_ignore"):
        weights_for(ours, path)
    assert weights_for(ours, path, "second", freeze=["^first"]).keys() == kept.keys()


def test_different_weights_for_tied_names_are_refused(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tiny.load_weights(model, _saved(tmp_path, saved))
    path = _saved(tmp_path, saved | {"1.weight": torch.eye(2)})
    with pytest.raises(UserError, match=r"different values for 0\.weight and 1\.weight, which are tied"):
        tiny.load_weights(model, path)
    tiny.load_weights(model, path, ignore="1.weight")


def _saved(folder: Path, tensors: Any) -> Path:
    torch.save(tensors, folder / "saved.pt")
    return folder / "saved.pt"


def test_refuses_files_without_a_state_dict(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        tiny.load_weights(tiny.Net(), tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(UserError, match=r"torch.load\(weights_only=True\) failed"):
        tiny.load_weights(tiny.Net(), tmp_path / "text.pt")
    torch.save({"model": tiny.Net().state_dict(), "args": Namespace(lr=1)}, tmp_path / "args.pt")
    with pytest.raises(
        UserError, match=r"contains argparse.Namespace in addition to tensors.*save only its tensors"
    ):
        tiny.load_weights(tiny.Net(), tmp_path / "args.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(UserError, match="contains a list without named tensors"):
        tiny.load_weights(tiny.Net(), tmp_path / "list.pt")
    torch.save({"a": torch.ones(1)}, tmp_path / "foreign.pt")
    with pytest.raises(UserError, match="no names in common"):
        tiny.load_weights(tiny.Net(), tmp_path / "foreign.pt")


def test_init_ignore_leaves_modules_as_initialized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs, ours = _nets()
    theirs.second = nn.Linear(7, 10)
    torch.save(theirs.state_dict(), tmp_path / "w.pt")
    before = ours.second.weight.clone()
    with pytest.raises(UserError, match=r"second.weight \(\[10, 7\] .*model.init_ignore=\[second\]"):
        tiny.load_weights(ours, tmp_path / "w.pt")
    with pytest.raises(UserError, match=r"model\.init_ignore names sec, which this model does not have"):
        tiny.load_weights(ours, tmp_path / "w.pt", ["sec"])
    with caplog.at_level(logging.INFO):
        tiny.load_weights(ours, tmp_path / "w.pt", ["second"])
    assert (
        "8 of the model's 10 tensors; left as initialized: second.bias, second.weight; not used"
        in caplog.text
    )
    assert torch.equal(ours.second.weight, before)
    assert torch.equal(ours.first.weight, theirs.first.weight)
    (line,) = caplog.records
    assert line.levelname == "INFO" and "left as initialized: second.bias, second.weight" in line.message


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_quantized_weights_are_refused(tmp_path: Path, kind: torch.dtype) -> None:
    theirs, ours = _nets()
    saved = {**theirs.double().state_dict(), "first.weight": theirs.first.weight.detach().to(kind)}
    with pytest.raises(
        UserError, match=rf"first.weight \(\[7, 5\] {kind} in the file, \[7, 5\] torch.float32"
    ):
        tiny.load_weights(ours, _saved(tmp_path, saved))
    assert len(weights_for(ours, _saved(tmp_path, theirs.state_dict()))) == 10  # of another width


def test_reads_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    theirs, ours = _nets()
    safetensors.save_file(theirs.state_dict(), tmp_path / "w")
    tiny.load_weights(ours, tmp_path / "w")
    assert _same(theirs, ours)
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match=r"is not a valid safetensors file: UserError: .* is too short"):
        tiny.load_weights(ours, tmp_path / "w.safetensors")


def _save_and_load(run_dir: Path) -> list[bool]:
    """Load from a checkpoint, from its run, and from the run when its newest checkpoint is damaged."""
    state = tiny.train_state(sharded=True)
    checkpointer = tiny.checkpointer(run_dir, format="sharded", state=state)
    results = []

    def matches(path: Path) -> None:
        fresh = tiny.Net()
        tiny.load_weights(fresh, path)
        results.append(
            all(torch.equal(tensor, saved[f"model.{name}"]) for name, tensor in fresh.state_dict().items())
        )

    tiny.train(state, 2)
    checkpointer.save(state)
    saved = tiny.everything(state)["tensors"]
    if torch_dist.get_rank() == 0:
        matches(run_dir / "checkpoints" / "step_00000002")
        matches(run_dir)
    tiny.train(state, 2)
    checkpointer.save(state)
    if torch_dist.get_rank() == 0:
        (run_dir / "checkpoints" / "step_00000004" / "state.json").write_text("{}")
        matches(run_dir)
    return results


def test_reads_checkpoints_and_runs(tmp_path: Path) -> None:
    assert run_ranks(_save_and_load, 2, tmp_path)[0] == [True, True, True]
