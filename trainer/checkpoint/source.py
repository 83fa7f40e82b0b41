"""A checkpoint opened for reading: its facts and its tensors, in either format."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist
from torch import Tensor

from trainer.checkpoint import full, sharded
from trainer.checkpoint.expected import not_finite
from trainer.checkpoint.hashing import digest_of
from trainer.checkpoint.matching import Shapes, first_five, of_modules_own
from trainer.checkpoint.store import Manifest, open_listed, read_manifest, step_in_name, verify
from trainer.checkpoint.tree import put_together, tensor_names
from trainer.errors import UserError
from trainer.files.untrusted import MAX_JSON_BYTES, Fields, printable, read_json
from trainer.optim.train_state import Progress

STATE, RNG = "state.json", "rng.pt"
_OF_TRAINED = ("model.", "ema.weights.")
PLACES = "places"  # beside the generators of each rank: where its data stood
_FORMATS: dict[str, tuple[str, Callable[[Path, Manifest], full.TensorFile | sharded.ShardedCheckpoint]]] = {
    "full": (full.TENSORS, full.TensorFile.open),
    "sharded": (sharded.METADATA, sharded.ShardedCheckpoint.open),
}


@dataclass(frozen=True)
class Source:
    """What ``open`` found in a directory.

    Attributes:
        facts: strategy, world_size, torch_version, config, and the JSON parts of the state and of the RNG.
        shapes: of every tensor, by its name.
    """

    directory: Path
    manifest: Manifest
    facts: dict[str, Any]
    shapes: Shapes
    _tensors: full.TensorFile | sharded.ShardedCheckpoint

    @classmethod
    def open(cls, directory: Path) -> "Source":
        """Read all but the tensors.

        Raises:
            UserError: ``directory`` is not seen from here, or is no such thing; a file or a tensor that has
                to be there is not; or what is there contradicts itself.
        """
        manifest = read_manifest(directory)
        if manifest.format not in _FORMATS:
            raise UserError(
                f"{printable(directory)} has the format {printable(manifest.format)}; "
                f"{' and '.join(_FORMATS)} are read here"
            )
        name_of_tensors, reader = _FORMATS[manifest.format]
        if missing := sorted({name_of_tensors, STATE, RNG} - manifest.files.keys()):
            raise UserError(f"{printable(directory)} is not whole: its manifest lacks {', '.join(missing)}")
        facts = _read_facts(directory, manifest)
        tensors = reader(directory, manifest)
        shapes = tensors.shapes
        _compare_names(directory / STATE, facts["state"], shapes)
        return cls(directory, manifest, facts, shapes, tensors)

    @property
    def seed(self) -> int:
        """The seed of the run that saved this. UserError if it names none."""
        return Fields(f"{self.directory / STATE}: config", self.facts["config"]).count("seed")

    def check(self, part: int, parts: int) -> None:
        """Read this part of so many. UserError where it cannot be read, or training would go on from NaN."""
        groups = self.facts["state"]["optimizer"]["param_groups"]
        trained = {f"{of}{name}" for group in groups for name in group["params"] for of in _OF_TRAINED}
        begun = set(self.facts.get("not_finite", ()))
        for name, tensor in self._tensors.parts(part, parts):
            checked = name in trained or name.startswith("optimizer.")
            if checked and name not in begun and (kinds := not_finite({name: tensor})):
                held = " and ".join(sorted(kinds[name]))
                raise UserError(f"{printable(self.directory)}: {printable(name)} holds {held}")
        self.rng(part % self.facts["world_size"])

    @property
    def progress(self) -> Progress:
        """How far the run had come, as an object of the caller's own."""
        return Progress(**self.facts["state"]["progress"])

    def rng(self, rank: int) -> dict[str, Any]:
        """What ``seeding.rng_state`` gave on ``rank``."""
        with open_listed(self.directory, self.manifest, RNG) as file:
            return put_together(self.facts["rng"][str(rank)], full.open_tensors(file), str(rank))

    def places(self) -> list[dict[str, Any]]:
        """Where the data of each rank stood, as its loader said; there are checkpoints without."""
        if PLACES not in self.facts["rng"]:
            return []
        with open_listed(self.directory, self.manifest, RNG) as file:
            return put_together(self.facts["rng"][PLACES], full.open_tensors(file), PLACES)

    def read_into(self, targets: dict[str, Tensor], group: torch_dist.ProcessGroup | None) -> None:
        """Fill the tensors (whole, or sharded in any layout) by their names.

        Collective over ``group``; None reads alone.
        """
        self._tensors.read_into(targets, group)

    def read(self, prefix: str = "") -> dict[str, Tensor]:
        """The whole tensors whose names begin with ``prefix``, by the rest of it; needs no process group."""
        found = self._tensors.read([name for name in self.shapes if name.startswith(prefix)])
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}

    def weights(self, averaged: bool) -> dict[str, Tensor]:
        """The model's state; of what `ema.decay` kept a moving average, on request that.

        Raises:
            UserError: there are no averages.
        """
        averages = self.read("ema.weights.") if averaged else {}
        if averaged and not averages:
            raise UserError(f"{printable(self.directory)} holds no averages: its run had ema.decay=null")
        weights = self.read("model.")
        return {name: weights[name] for name in weights if not of_modules_own(name)} | averages


def whole(directory: Path, part: int = 0, parts: int = 1) -> Source:
    """The checkpoint in ``directory``, found to be complete, undamaged and sound.

    With ``parts``, every one of so many readers looks through a part of the large files.

    Raises:
        UserError: it is not; the message says why.
    """
    verify(directory, part, parts)
    source = Source.open(directory)
    source.check(part, parts)
    return source


def check_size(state_bytes: int, num_bytes: int) -> None:
    """UserError where STATE is larger than is read, of a checkpoint of ``num_bytes``."""
    limit = max(MAX_JSON_BYTES, num_bytes // 64)
    if state_bytes > limit:
        raise UserError(
            f"{STATE} has {state_bytes:,} bytes, and more than {limit:,} are not read: keep what is large of "
            "a module's extra state in tensors, or bytes"
        )


def _read_facts(directory: Path, manifest: Manifest) -> dict[str, Any]:
    """What state.json says, each part of the type it has to be."""
    path = directory / STATE
    with open_listed(directory, manifest, STATE) as file:
        check_size(file.size, manifest.num_bytes)
        data = file.read(file.size)
        if digest_of(file) != manifest.files[STATE]:
            raise UserError(f"{printable(directory)} is damaged: the sha256 of {STATE} is not the manifest's")
    facts = Fields(str(path), read_json(path, data))
    facts.text("strategy"), facts.text("torch_version"), facts.mapping("config")
    state, rng = facts.mapping("state"), facts.mapping("rng")
    for section in ("model", "schedule", "scaler", *({"buffers", "ema"} & state.values.keys())):
        state.mapping(section)
    optimizer = state.mapping("optimizer")
    optimizer.mapping("state")
    for index, group in enumerate(optimizer.sequence("param_groups")):
        Fields(f"{path}: param_groups.{index}", group).sequence("params", of=str)
    progress = _progress(state.mapping("progress"), facts.mapping("config"))
    if facts.values.get("num_samples") is not None:  # None: a stream
        facts.count("num_samples")
    if facts.has("not_finite"):
        facts.sequence("not_finite", of=str)
    if facts.count("world_size") < 1:
        raise UserError(f"{printable(path)} has world_size 0")
    for rank in range(facts.values["world_size"]):
        rng.mapping(str(rank))
    named = step_in_name(directory)
    if not progress.step == manifest.step == (manifest.step if named is None else named):
        raise UserError(
            f"{printable(directory)} contradicts itself: its state is of step {progress.step}, its "
            f"manifest of step {manifest.step}; its name must be step_{manifest.step:08d}"
        )
    return {**facts.values, "state": {**state.values, "progress": asdict(progress)}}


def _progress(saved: Fields, config: Fields) -> Progress:
    """Progress as it is counted now: there are checkpoints that count the epoch's steps, not its samples."""
    if "step_in_epoch" in saved.values:
        in_epoch = saved.count("step_in_epoch") * config.count("train.global_batch_size")
    else:
        in_epoch = saved.count("samples_in_epoch")
    return Progress(saved.count("step"), saved.count("epoch"), in_epoch, saved.count("samples_seen"))


def _compare_names(path: Path, state: dict[str, Any], shapes: Shapes) -> None:
    """UserError unless every tensor that the state names is there, once, and no other."""
    named = tensor_names(state)
    if missing := sorted(set(named) - set(shapes)):
        raise UserError(f"{printable(path)} names tensors that are not there: {first_five(missing)}")
    if sorted(named) != sorted(shapes):
        foreign = sorted(set(shapes) - set(named)) or ["some twice"]
        raise UserError(f"{printable(path)} does not name the tensors that are there: {first_five(foreign)}")
