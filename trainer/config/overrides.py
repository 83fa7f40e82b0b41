"""Explains in one line what is wrong with a command line, and writes overrides."""

import dataclasses
import difflib
import re
import typing
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from trainer.config.schema import Config

# Hydra 1.4 warns of what 1.5 changes, which pyproject.toml does not allow yet. Without it 1.3 warns.
warnings.filterwarnings("ignore", message="The version_base parameter is deprecated")

CONF = Path(__file__).parents[1] / "conf"
# Settings that had another name before version 0.2.0.
RENAMED = {
    "train.stop": "train.early_stopping",
    "checkpoint.at_fault": "checkpoint.on_failure",
    "optim.undecayed": "optim.no_decay",
}
EACH_TRIAL_LAUNCHES = (
    "each trial of a sweep is its own launch; leave it out, set launch=local launch.processes=N or "
    "launch=slurm, and hydra.sweeper.concurrent=N for several at a time"
)


def in_words(error: Exception) -> str:
    """The message of a failed composition in one line, with the nearest valid name."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        if group == "hydra/launcher":
            return f"{group}={option}: {EACH_TRIAL_LAUNCHES}"
        options = ", ".join(error.options)
        return f"{group} is {option}, but must be one of {options}{_nearest(option, error.options, group)}"
    if unknown := missing_key(error):
        return not_a_setting(getattr(error.__cause__, "full_key", None) or unknown)
    said = str(error).partition("\nConfig search path")[0]
    if said.startswith("Error merging override"):  # a list for settings by name, or the other way round
        key = str(getattr(error.__cause__, "full_key", ""))
        is_list = "object_type=list" in str(error.__cause__)
        return f"{key} must be {'a list: [...]' if is_list else 'settings by name: {NAME: VALUE, ...}'}"
    said = re.sub(r"^Error when parsing index: .*\n", "", said)  # of Hydra 1.4
    override = str(getattr(error, "override", ""))
    key, _, value = override.partition("=")
    kinds = {"[": f"'{key}=[\"VALUE\", ...]'", "{": f"'{key}={{NAME: \"VALUE\", ...}}'"}
    quoted = kinds.get(value[:1], f"{key}='\"VALUE\"'")
    unread = re.match(r"LexerNoViableAltException: (.*)\n( *)\^", said)
    if unread:  # the mark is below the first character that no grammar rule accepts
        at = max(0, len(unread[2]) - len("LexerNoViableAltException: "))
        return f"{unread[1]} cannot be read from {unread[1][at:]!r} on; quote the value: {quoted}"
    if said.startswith("mismatched input '=' expecting <EOF>"):
        return f"the value of {key} contains a =; quote it: {quoted}"
    if value[:1] in kinds:  # the shell split it at a space, or a value has a special character
        return (
            f"{override} cannot be parsed; quote the whole override for the shell, and each string in it: "
            f"{quoted}"
        )
    return " ".join(said.partition("\nSee https://hydra.cc")[0].split())


def missing_key(error: Exception) -> str | None:
    """Return the key of an override that failed because the config has no such key; None otherwise."""
    unknown = re.match(r"Could not override '(.+?)'", str(error))
    return unknown[1] if unknown else None


def set_to(name: str, text: str) -> str:
    """The override that sets `name` to `text`, with any characters."""
    plain = re.fullmatch(r"[A-Za-z0-9_/.-]*[A-Za-z_/][A-Za-z0-9_/.-]*", text)
    return f"{name}={text if plain else QuotedString(text, Quote.single).with_quotes()}"


def not_a_setting(key: str, composed: DictConfig | None = None) -> str:
    """The message that ``key`` is unknown, with what may be meant: a setting, a group, another option."""
    for old, new in RENAMED.items():
        if f"{key}.".startswith(f"{old}."):
            return f"{old} has been renamed; set {new}"
    node, _, word = key.rpartition(".")
    keys = dict(mapping_settings(Config)).get(node)
    if keys == [] or key.startswith("vars."):  # the arguments of a class, or a user's own
        return f"{key} has no place yet: +{key}=VALUE gives it one"
    if keys:
        if word in keys:
            return f"{key} has no place, since {node} is null; set all of it: {_all_of(node, keys)}"
        return f"{key} is not a setting; {node} has {', '.join(keys)}"
    known = _settings()
    if composed is not None:
        here = OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(composed)), resolve=False)
        others = [name for name, _ in leaves(here) if not f"{name}.".startswith(f"{key}.")]
        known = {name: [] for name in others} | known
    nodes = {name.rpartition(".")[0] for name in known if not name.startswith("hydra.")} - {""}
    if known.get(key):
        return f"{key} is not a setting here, but under {', '.join(known[key])}{_for_a_class(key, known)}"
    hint = _nearest(key, {*known, *nodes}) or "; `python train.py --cfg job` prints all settings"
    if composed is not None and not node:  # it was added to the root
        hint += f" (a value of your own goes under vars: +vars.{key}=VALUE, used as ${{vars.{key}}})"
    return f"{key} is not a setting{hint}{_for_a_class(key, known)}"


def no_value(key: str) -> str:
    """The message that ``key``, which must be set, is not."""
    node, _, word = key.rpartition(".")
    way = f"'{node}={{{word}: ..., ...}}'" if node in dict(mapping_settings(Config)) else f"{key}=..."
    return f"{key} has no value; set {way}"


def wrong_kind(key: str, said: str) -> str:
    """The message that ``key`` has a value of a wrong type, or wrongly null; ``said`` is OmegaConf's."""
    keys = dict(mapping_settings(Config)).get(key)
    if keys == []:
        return f"{key} names a class or a function; set null, or '{key}={{_target_: ...}}'"
    if keys:
        return f"{key} has several values; set null, or {_all_of(key, keys)}"
    if said.endswith("Cannot assign str to Dict[str, Any]"):
        return f"{key} must be a mapping: '{key}={{NAME: VALUE, ...}}'"
    if "is not a ListConfig" in said:
        return f"{key} must be a list: '{key}=[\"VALUE\", ...]'"
    return f"{key} is null, but must have a value" if "value 'None'" in said else f"{key}: {said}"


def _all_of(node: str, names: Iterable[str]) -> str:
    return f"'{node}={{{', '.join(f'{name}: ...' for name in names)}}}'"


def mapping_settings(kind: type, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """The settings that are one mapping or null, such as train.early_stopping, and the keys of each.

    A setting whose mapping may have any keys has [].

    Args:
        kind: a dataclass of the schema.
    """
    for name, hint in typing.get_type_hints(kind).items():
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part) and part is hint:
                yield from mapping_settings(typing.cast(type, part), f"{prefix}{name}.")
            elif part is not hint and typing.get_origin(part) is dict:
                yield prefix + name, []
            elif dataclasses.is_dataclass(part):
                yield prefix + name, [field.name for field in dataclasses.fields(part)]


def _for_a_class(key: str, known: Iterable[str]) -> str:
    """How to pass ``key`` to a user's class, if it is under one."""
    node = key.rpartition(".")[0]
    if f"{node}._target_" not in known or node.startswith("hydra."):
        return ""
    return f" (+{key}=VALUE passes it to {node}._target_)"


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in nested dicts by its dotted name, as written on the command line."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _nearest(name: str, names: Iterable[str], group: str | None = None) -> str:
    """The nearest of `names`: one with the same last word, one that contains it, or one spelled alike."""
    node, _, word = name.rpartition(".")
    last = {each: each.rpartition(".")[2] for each in sorted(names)}
    same = [each for each in last if last[each] == word]
    longer = [each for each in last if f"_{word}_" in f"_{last[each]}_" and each.startswith(node)]
    known = {last[each]: each for each in reversed(last) if node in ("", each.rpartition(".")[0])}
    alike = [known[each] for each in difflib.get_close_matches(word, known, 1)]
    best = next(iter(same or longer or alike), None)
    return f"; did you mean {group + '=' if group else ''}{best}?" if best else ""


def _settings() -> dict[str, list[str]]:
    """Every setting and group in conf/, with the options (``group=option``) that have it."""
    found: dict[str, list[str]] = {}
    for file in sorted(CONF.glob("**/*.yaml")):
        group = ".".join(file.relative_to(CONF).parts[:-1])
        found.setdefault(group, [])
        if group == "experiment":
            continue
        for name, _ in leaves(OmegaConf.to_container(OmegaConf.load(file), resolve=False), group):
            if group == "hydra.sweeper" or not name.startswith(("hydra.", "defaults", f"{group}.defaults")):
                found.setdefault(name, [])
                if group and not group.startswith("hydra."):
                    found[name].append(f"{group}={file.stem}")
    return found
