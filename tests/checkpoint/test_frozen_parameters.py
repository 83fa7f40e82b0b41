"""checkpoint.frozen=false: frozen parameters that came from model.init_from are read from there on resume."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.failures.test_ends import TINY, refusals
from tests.ranks import run_ranks
from tests.runs import train
from tests.user_parts import Tiny
from trainer import api
from trainer.checkpoint.__main__ import main
from trainer.config.saved_run import saved_settings
from trainer.inference.restore import restored_run


def words(root: Path) -> tuple[str, ...]:
    return (
        *(*TINY, "schedule=constant", "train.eval_every_epochs=0", "model.freeze=[layers.0]"),
        *(f"model.init_from={root / 'base.pt'}", "checkpoint.frozen=false", "checkpoint.every_steps=2"),
    )


def begun(root: Path, bias: float = 1.0) -> dict[str, torch.Tensor]:
    weights = {name: torch.full_like(value, 0.3) for name, value in Tiny().state_dict().items()}
    weights["layers.0.bias"] += bias
    torch.save(weights, root / "base.pt")
    return weights


def runs(root: Path, *strategy: str) -> list[str]:
    """Return the hashes of an uninterrupted run, a resumed one, and one resumed from a full save."""
    given = (*words(root), *strategy)
    hashes = [str(train(*given, "train.max_steps=4", f"run_dir={root / 'whole'}")["param_sha256"])]
    for name, frozen in (("halves", "false"), ("mixed", "true")):
        here = (*given, f"run_dir={root / name}")
        train(*here, "train.max_steps=2", f"checkpoint.frozen={frozen}")
        hashes.append(str(train(*here, "train.max_steps=4", "resume=auto")["param_sha256"]))
    with restored_run(saved_settings(root / "halves", strategy[:1]), "newest") as restored:
        assert restored.checkpoint.left_out.keys() == {"layers.0.weight", "layers.0.bias"}
    return hashes


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        (1, ("strategy=single",)),
        pytest.param(2, ("strategy=fsdp",), marks=pytest.mark.slow),
        pytest.param(
            2,
            ("strategy=ddp", "checkpoint=sharded", "checkpoint.frozen=false", "checkpoint.async=true"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_resume_reads_frozen_parameters_from_init_from(
    tmp_path: Path, world_size: int, strategy: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    base = begun(tmp_path)
    hashes = run_ranks(runs, world_size, tmp_path, *strategy, init=False)[0]
    assert len(set(hashes)) == 1, hashes
    newest = tmp_path / "halves" / "checkpoints" / "step_00000004"
    saved = set().union(*(load_file(path) for path in newest.glob("model-*")))
    assert saved == {"layers.2.weight", "layers.2.bias"}
    model = api.load_model(tmp_path / "halves", "newest")
    assert model.get_parameter("layers.0.bias").equal(base["layers.0.bias"])
    assert not model.get_parameter("layers.2.bias").equal(base["layers.2.bias"])
    assert main(["convert", str(newest), str(tmp_path / "out"), "--to", "torch"]) == 2
    assert "does not contain layers.0.weight, layers.0.bias, because its run" in capsys.readouterr().err


def refused(root: Path) -> list[str]:
    here = (*words(root), "strategy=single", f"run_dir={root / 'run'}", "train.max_steps=4")
    train(*here, "train.max_steps=2")
    whole = (*here, "checkpoint.frozen=true", f"run_dir={root / 'whole'}")
    hashes = [train(*whole)["param_sha256"]]
    shutil.rmtree(root / "whole" / "checkpoints" / "step_00000004")
    begun(root, bias=2.0)
    changed = refusals((*here, "resume=auto"))
    (root / "base.pt").unlink()
    own = (*here, "resume=auto", "model.init_from=null", "checkpoint.frozen=true")
    none = (*here, "model.init_from=null", f"run_dir={root / 'other'}")
    gone = refusals((*here, "resume=auto"), own, none)
    hashes.append(train(*whole, "resume=auto")["param_sha256"])  # which needs no initial weights
    assert hashes[0] == hashes[1]
    begun(root)
    weights = (*here, f"model.init_from={root / 'run'}", f"run_dir={root / 'third'}")
    return [*changed, *gone, *refusals(weights)]


def test_different_or_missing_initial_weights_are_refused(tmp_path: Path) -> None:
    begun(tmp_path)
    changed, missing, own, none, weights = run_ranks(refused, 1, tmp_path, init=False)[0]
    left_out = (
        "does not contain {}, because its run had checkpoint.frozen=false, and "
        f"model.init_from={tmp_path}/base.pt has different values"
    )
    assert left_out.format("layers.0.bias") in changed
    assert f"model.init_from={tmp_path}/base.pt does not exist; set the current path. A new run" in missing
    assert left_out.format("layers.0.weight, layers.0.bias") in own
    assert (
        "excludes from checkpoints the frozen parameters that model.init_from loads, but this model has none"
        in none
    )
    assert (
        "layers.0.bias, because its run had checkpoint.frozen=false: they are in model.init_from=" in weights
    )


class Drifts(Tiny):
    """Changes frozen parameters in forward."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.layers[0].bias.data += 1
        return super().forward(rows)


def test_a_frozen_parameter_that_changes_must_be_saved(tmp_path: Path) -> None:
    begun(tmp_path)
    drifts = (f"model._target_={__name__}.Drifts", "strategy=single", f"run_dir={tmp_path / 'run'}")
    ((said,),) = run_ranks(refusals, 1, (*words(tmp_path), *drifts), init=False)
    assert "no longer have the values in model.init_from: layers.0.bias; set" in said
