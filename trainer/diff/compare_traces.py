"""Compare the traces of a step in two runs, entry by entry, in the order in which a step computes them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.errors import first_few

KINDS = ["before", "samples", "batch", "outputs", "loss", "backward", "gradients", "optimizer", "update"]

Entry = Mapping[str, Any]
"""As `StepTrace` writes it: kind and name; hash, value or text if it has them; the sample of each row."""


class Difference(NamedTuple):
    """The difference of an entry between two runs."""

    kind: str
    name: str
    words: str


def read_traces(folder: Path) -> dict[int, list[Entry]]:
    """Return the entries of each step, each with the rows of all ranks and micro-batches in one tensor."""
    steps: dict[int, list[Entry]] = {}
    for number in range(len(list(folder.glob("*.pt")))):
        for step, entries in torch.load(folder / f"{number}.pt", weights_only=True).items():
            steps.setdefault(step, []).extend(entries)
    return {step: _merged(entries) for step, entries in steps.items()}


def _merged(entries: Sequence[Entry]) -> list[Entry]:
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry["kind"], entry["name"]), []).append(entry)
    merged: list[Entry] = []
    for (_, name), parts in groups.items():
        if len(parts) == 1 or "part" not in parts[0]:  # the same on all ranks
            merged.append(parts[0])
        elif all(_has_rows(part) for part in parts) and len({p["value"].shape[1:] for p in parts}) == 1:
            positions = torch.tensor([at for part in parts for at in part["positions"]])
            samples = torch.tensor([sample for part in parts for sample in part["samples"]])
            order = positions.argsort()
            value = torch.cat([part["value"] for part in parts])[order]
            whole = {name: content for name, content in parts[0].items() if name != "hash"}
            merged.append({**whole, "value": value, "samples": samples[order].tolist()})
        else:
            for part in parts:
                rank, micro_batch = part["part"]
                where = f"{name}, micro-batch {micro_batch + 1} on rank {rank}"
                merged.append({**part, "name": where})
    return sorted(merged, key=lambda entry: KINDS.index(entry["kind"]))


def _has_rows(entry: Entry) -> bool:
    value = entry.get("value")
    return value is not None and value.ndim > 0 and len(value) == len(entry.get("samples", ()))


def differences(
    one: Sequence[Entry], other: Sequence[Entry], tolerance: float
) -> tuple[list[Difference], dict[str, int]]:
    """Return the entries that differ by more than `tolerance` ulp, in order, and the number of each kind.

    Entries that only one of the runs has count as different, unless their micro-batches can't be matched.
    """
    theirs = {(entry["kind"], entry["name"]): entry for entry in other}
    found, counts = list[Difference](), dict.fromkeys(KINDS, 0)
    for entry in one:
        match = theirs.pop((entry["kind"], entry["name"]), None)
        if match is not None:
            counts[entry["kind"]] += 1
            found += _difference(entry, match, tolerance)
        elif ", micro-batch " not in entry["name"]:
            found.append(Difference(entry["kind"], entry["name"], "only in A"))
    found += [Difference(*entry, "only in B") for entry in theirs if ", micro-batch " not in entry[1]]
    return sorted(found, key=lambda each: KINDS.index(each.kind)), counts


def _difference(one: Entry, other: Entry, tolerance: float) -> list[Difference]:
    def differ(words: str) -> list[Difference]:
        return [Difference(one["kind"], one["name"], words)]

    if "text" in one:
        return [] if one["text"] == other["text"] else differ(f"{one['text']} and {other['text']}")
    if "hash" in one and one["hash"] == other.get("hash"):
        return []
    mine, theirs = one.get("value"), other.get("value")
    if mine is None or theirs is None:
        return differ("not measured: the step has more than 4 GiB of tensors")
    if mine.shape != theirs.shape:
        return differ(f"shape {tuple(mine.shape)} and {tuple(theirs.shape)}")
    units_apart, apart = units(mine, theirs)
    changed = (units_apart > 0).flatten()
    count, most = int(changed.sum()), float(units_apart.max()) if mine.numel() else 0.0
    if most <= tolerance:
        return []
    if not mine.ndim:
        words = f"{mine.item()!r} and {theirs.item()!r}"
    else:
        words = f"{count:,} of {mine.numel():,} elements, at most {float(apart.max()):.3g}"
    if mine.is_floating_point():
        words += f" ({most:.3g} ulp)"
    if mine.dtype != theirs.dtype:
        words += f", {mine.dtype} and {theirs.dtype}"
    if one["kind"] == "samples":
        shown = [first_few(value[changed].tolist()) for value in (mine, theirs)]
        return differ(f"{count} of {len(mine)}: {shown[0]} in A, {shown[1]} in B")
    if _has_rows(one) and one["kind"] != "loss":
        rows = (units_apart > tolerance).flatten(1).any(1) if mine.ndim > 1 else units_apart > tolerance
        if not rows.all():
            numbers = [
                sample for sample, differs in zip(one["samples"], rows.tolist(), strict=True) if differs
            ]
            words += f", in sample{'s' * (len(numbers) > 1)} {first_few(numbers)}"
    return differ(words)


def units(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the differences of elements, in units in the last place (ulp) and as numbers.

    The unit is the spacing of the less precise type at the size of the element or, for smaller elements, at
    the root mean square of the tensor: for elements close to 0, rounding causes differences of many units at
    their own size. NaN equals NaN; otherwise, a difference from NaN or Inf is infinite. For integers, the
    unit is 1; for float64 scalars, which are losses, it is that of float32.
    """
    types = [t.dtype for t in (one, other) if t.is_floating_point()]
    a, b = one.double(), other.double()
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs().nan_to_num(math.inf, math.inf))
    if not types:
        return apart, apart
    eps = max(torch.finfo(torch.float32 if t == torch.float64 and not one.ndim else t).eps for t in types)
    size = torch.maximum(a.abs(), b.abs())
    finite = size[size.isfinite()]
    size = size.nan_to_num(0.0, 0.0).clamp(min=float(finite.square().mean().sqrt()) if len(finite) else 0.0)
    spacing = eps * torch.exp2(torch.floor(torch.log2(size.clamp(min=1e-300))))
    return apart / spacing, apart
