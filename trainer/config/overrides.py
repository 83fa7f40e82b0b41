"""Messages for mistakes on the command line, and formatting of overrides."""

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

# Hydra 1.4 warns about the argument version_base, but 1.3 warns if it is missing.
warnings.filterwarnings("ignore", message="The version_base parameter is deprecated")

CONF = Path(__file__).parents[1] / "conf"
# Settings that had a different name before version 0.2.0.
RENAMED = {
    "train.stop": "train.early_stopping",
    "checkpoint.at_fault": "checkpoint.on_failure",
    "optim.undecayed": "optim.no_decay",
}
EACH_TRIAL_LAUNCHES = (
    "each trial of a sweep is launched separately; remove this setting, and use launch=local "
    "launch.processes=N or launch=slurm, with hydra.sweeper.concurrent=N to run several trials at a time"
)


def explain(error: Exception) -> str:
    """Return the message of an error in composing the settings, on one line, with the nearest valid name."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        if group == "hydra/launcher":
            return f"{group}={option}: {EACH_TRIAL_LAUNCHES}"
        options = ", ".join(error.options)
        return f"{group} is {option}, but must be one of {options}{_nearest(option, error.options, group)}"
    if unknown := missing_key(error):
        return not_a_setting(getattr(error.__cause__, "full_key", None) or unknown)
    message = str(error).partition("\nConfig search path")[0]
    if message.startswith("Error merging override"):  # a list instead of a mapping, or vice versa
        key = str(getattr(error.__cause__, "full_key", ""))
        is_list = "object_type=list" in str(error.__cause__)
        return f"{key} must be {'a list: [...]' if is_list else 'a mapping: {NAME: VALUE, ...}'}"
    message = re.sub(r"^Error when parsing index: .*\n", "", message)  # Hydra 1.4
    override = str(getattr(error, "override", ""))
    key, _, value = override.partition("=")
    kinds = {"[": f"'{key}=[\"VALUE\", ...]'", "{": f"'{key}={{NAME: \"VALUE\", ...}}'"}
    quoted = kinds.get(value[:1], f"{key}='\"VALUE\"'")
    unread = re.match(r"LexerNoViableAltException: (.*)\n( *)\^", message)
    if unread:  # the mark is below the first character that no grammar rule accepts
        at = max(0, len(unread[2]) - len("LexerNoViableAltException: "))
        return f"{unread[1]} cannot be parsed at {unread[1][at:]!r}; quote the value: {quoted}"
    if message.startswith("mismatched input '=' expecting <EOF>"):
        return f"the value of {key} contains a =; quote it: {quoted}"
    if value[:1] in kinds:  # the shell split it at a space, or a value has a special character
        return (
            f"{override} cannot be parsed; quote the whole override for the shell, and each string in it: "
            f"{quoted}"
        )
    return " ".join(message.partition("\nSee https://hydra.cc")[0].split())


def missing_key(error: Exception) -> str | None:
    """Return the key of an override for which the config has no such key; None for any other error."""
    unknown = re.match(r"Could not override '(.+?)'", str(error))
    return unknown[1] if unknown else None


def set_to(name: str, text: str) -> str:
    """Return the override that sets `name` to `text`, quoted if necessary."""
    plain = re.fullmatch(r"[A-Za-z0-9_/.-]*[A-Za-z_/][A-Za-z0-9_/.-]*", text)
    return f"{name}={text if plain else QuotedString(text, Quote.single).with_quotes()}"


def not_a_setting(key: str, composed: DictConfig | None = None) -> str:
    """Return the message for an unknown `key`, with the setting, group or choice that was probably meant."""
    for old, new in RENAMED.items():
        if f"{key}.".startswith(f"{old}."):
            return f"{old} has been renamed; set {new}"
    node, _, word = key.rpartition(".")
    keys = dict(mapping_settings(Config)).get(node)
    if keys == [] or key.startswith("vars."):  # arguments of a class, or the user's own values
        return f"{key} does not exist yet; +{key}=VALUE adds it"
    if keys:
        if word in keys:
            return f"{key} cannot be set while {node} is null; set the whole mapping: {_all_of(node, keys)}"
        return f"{key} is not a setting; {node} has the keys {', '.join(keys)}"
    known = _settings()
    if composed is not None:
        here = OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(composed)), resolve=False)
        others = [name for name, _ in leaves(here) if not f"{name}.".startswith(f"{key}.")]
        known = {name: [] for name in others} | known
    nodes = {name.rpartition(".")[0] for name in known if not name.startswith("hydra.")} - {""}
    if choices := known.get(key):
        needed = " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
        return f"{key} is not a setting here; it requires {needed}{_for_a_class(key, known)}"
    hint = _nearest(key, {*known, *nodes}) or "; `python train.py --cfg job` prints all settings"
    if composed is not None and not node:  # added at the top level
        hint += f" (put your own values under vars: +vars.{key}=VALUE, and use ${{vars.{key}}})"
    return f"{key} is not a setting{hint}{_for_a_class(key, known)}"


def no_value(key: str) -> str:
    """Return the message for a required `key` that is not set."""
    node, _, word = key.rpartition(".")
    way = f"'{node}={{{word}: ..., ...}}'" if node in dict(mapping_settings(Config)) else f"{key}=..."
    return f"{key} has no value; set {way}"


def wrong_type(key: str, message: str) -> str:
    """Return the message for a value of the wrong type at `key`; `message` is OmegaConf's."""
    keys = dict(mapping_settings(Config)).get(key)
    if keys == []:
        return f"{key} must be null or name a class or function: '{key}={{_target_: ...}}'"
    if keys:
        return f"{key} must be null or a mapping: {_all_of(key, keys)}"
    if message.endswith("Cannot assign str to Dict[str, Any]"):
        return f"{key} must be a mapping: '{key}={{NAME: VALUE, ...}}'"
    if "is not a ListConfig" in message:
        return f"{key} must be a list: '{key}=[\"VALUE\", ...]'"
    return f"{key} is null, but must have a value" if "value 'None'" in message else f"{key}: {message}"


def _all_of(node: str, names: Iterable[str]) -> str:
    return f"'{node}={{{', '.join(f'{name}: ...' for name in names)}}}'"


def mapping_settings(kind: type, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each setting that is a mapping or null, with its keys; [] if any keys are allowed."""
    for name, hint in typing.get_type_hints(kind).items():
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part) and part is hint:
                yield from mapping_settings(typing.cast(type, part), f"{prefix}{name}.")
            elif part is not hint and typing.get_origin(part) is dict:
                yield prefix + name, []
            elif dataclasses.is_dataclass(part):
                yield prefix + name, [field.name for field in dataclasses.fields(part)]


def _for_a_class(key: str, known: Iterable[str]) -> str:
    node = key.rpartition(".")[0]
    if f"{node}._target_" not in known or node.startswith("hydra."):
        return ""
    return f" (+{key}=VALUE passes it to {node}._target_)"


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value in nested dicts with its dotted name, as written on the command line."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _nearest(name: str, names: Iterable[str], group: str | None = None) -> str:
    """Return a hint with a name that has the same last word, contains it, or is spelled alike."""
    node, _, word = name.rpartition(".")
    last = {each: each.rpartition(".")[2] for each in sorted(names)}
    same = [each for each in last if last[each] == word]
    longer = [each for each in last if f"_{word}_" in f"_{last[each]}_" and each.startswith(node)]
    known = {last[each]: each for each in reversed(last) if node in ("", each.rpartition(".")[0])}
    alike = [known[each] for each in difflib.get_close_matches(word, known, 1)]
    best = next(iter(same or longer or alike), None)
    return f"; did you mean {group + '=' if group else ''}{best}?" if best else ""


def _settings() -> dict[str, list[str]]:
    """Return every setting and group in conf/, with the choices (`group=choice`) that contain it."""
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
