"""state.json of a checkpoint: its contents with checked types, and what they name."""

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from trainer.checkpoint.hashing import check_blocks
from trainer.checkpoint.manifest import Manifest, open_listed, step_in_name
from trainer.errors import UserError
from trainer.files.address import Location
from trainer.files.untrusted import Fields, first_five, printable, read_json
from trainer.optim.train_state import Progress

STATE = "state.json"
# Keys of the facts, as the contents of the file are called:
MODEL_CONFIG = "model_config"  # the config.json of a Hugging Face model
DATA_STATES = "places"  # where the data of each rank stands


def read_facts(directory: Location, manifest: Manifest) -> tuple[dict[str, Any], Fields]:
    """The contents of state.json, with checked types, and its index of tensors, still to be checked.

    Raises:
        UserError: it is missing or damaged, has other types, or contradicts itself or the manifest.
    """
    path = directory / STATE
    with open_listed(directory, manifest, STATE) as file:
        data = bytearray(file.size)

        def keep(offset: int, block: memoryview) -> None:
            data[offset : offset + len(block)] = block

        check_blocks(file, manifest.files[STATE], range(len(manifest.files[STATE].sha256)), keep)
    facts = Fields(str(path), read_json(path, bytes(data)))
    facts.text("strategy"), facts.text("torch_version"), facts.mapping("config")
    state, data_states = facts.mapping("state"), facts.sequence(DATA_STATES, of=dict)
    for section in ("model", "schedule", "scaler", "buffers", "ema", "settings"):
        state.mapping(section)
    optimizer = state.mapping("optimizer")
    optimizer.mapping("state")
    for index, group in enumerate(optimizer.sequence("param_groups")):
        Fields(f"{path}: param_groups.{index}", group).sequence("params", of=str)
    settings = state.mapping("settings")
    settings.mapping("schedule")
    if len(settings.sequence("groups", of=dict)) != len(optimizer.sequence("param_groups")):
        raise UserError(f"{printable(path)} has the settings of other groups than the optimizer's")
    saved = state.mapping("progress")
    progress = Progress(**{name: saved.count(name) for name in asdict(Progress())})
    if state.has("early_end"):
        state.mapping("early_end")
    if facts.has("num_samples"):  # without: a stream
        facts.count("num_samples")
    if facts.has(MODEL_CONFIG):
        facts.mapping(MODEL_CONFIG)
    if facts.has("exact"):
        exact = facts.mapping("exact")
        exact.count("leaves"), exact.count("since"), exact.mapping("ground")
    if facts.count("world_size") < 1:
        raise UserError(f"{printable(path)} has world_size 0")
    if len(data_states) != facts.values["world_size"]:
        raise UserError(
            f"{printable(path)} has the data's states of {len(data_states)} ranks, but world_size "
            f"{facts.values['world_size']}"
        )
    named = step_in_name(directory)
    if not progress.step == manifest.step == (manifest.step if named is None else named):
        raise UserError(
            f"{printable(directory)} contradicts itself: its state is of step {progress.step}, its "
            f"manifest of step {manifest.step}; its name must be step_{manifest.step:08d}"
        )
    values = {**facts.values, "state": {**state.values, "progress": asdict(progress)}}
    return values, facts.mapping("tensors")


def compare_names(path: Location, named: list[str], index: Collection[str]) -> None:
    """Raise UserError unless ``index`` has every tensor in ``named``, by the state, once, and no others."""
    if missing := sorted(set(named) - set(index)):
        raise UserError(f"{printable(path)} names tensors that are not there: {first_five(missing)}")
    if sorted(named) != sorted(index):
        foreign = sorted(set(index) - set(named)) or ["some twice"]
        raise UserError(f"{printable(path)} does not name the tensors that are there: {first_five(foreign)}")
