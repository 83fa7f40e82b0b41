"""Nested values are traversed in order, and rebuilt with the same types."""

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainer.tensors.nested import leaves, mapped


class Pair(NamedTuple):
    image: Tensor
    name: str


class Output(OrderedDict[str, Any]):
    """A dict whose constructor has other arguments, as in transformers."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)

    def __reduce__(self) -> Any:
        return _output, (dict(self),)


@dataclass(frozen=True)
class Sample:
    image: Tensor
    boxes: list[Tensor]
    areas: Tensor = field(init=False)  # which a user sets later


class Graph:
    """Has its own `to`."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def to(self, device: Any) -> "Graph":
        return Graph(self.nodes.to(device))


def _output(values: dict[str, Any]) -> Output:
    return Output(**values)


ONE, TWO = torch.tensor([1.0]), torch.tensor([2.0])
NESTS = [
    [ONE, (TWO, {"a": ONE})],
    Pair(ONE, "x"),
    defaultdict(list, a=ONE),
    Output(logits=ONE, caches=((ONE, TWO),)),
    UserDict(a=ONE, b=[TWO]),
    Sample(ONE, [TWO, ONE]),
    (torch.Size([3]), [], ONE),
    ONE,
]


def doubled(value: Any) -> Any:
    return value * 2 if isinstance(value, Tensor) else value


@pytest.mark.parametrize("value", NESTS, ids=lambda value: type(value).__name__)
def test_nested_values_are_rebuilt_with_the_same_types(value: Any) -> None:
    made = mapped(value, doubled)
    assert type(made) is type(value)
    assert [str(leaf) for leaf in leaves(made)] == [str(doubled(leaf)) for leaf in leaves(value)]
    assert leaves(value), "in it nothing is lost"
    assert mapped(value, lambda leaf: leaf) is value, "a list to which a module appends stays the caller's"


def test_an_object_with_to_is_changed_as_a_whole_and_traversed() -> None:
    graph, known = Graph(ONE), MappingProxyType({"a": TWO})
    batch = [graph, known, 1]
    assert leaves(batch) == [ONE, TWO, 1]
    moved = mapped(batch[::2], lambda value: value.to("meta") if hasattr(value, "to") else value)
    assert moved[0] is not graph and moved[0].nodes.is_meta and moved[1] == 1
    assert mapped(batch, lambda value: value) is batch
    batch.append(batch)
    assert leaves(batch) == [ONE, TWO, 1], "a list within itself"


def test_the_batch_sizes_of_packed_sequences_stay_on_the_cpu() -> None:
    packed = pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False)
    (moved,) = mapped([packed], lambda value: value.to("meta"))
    assert isinstance(moved, PackedSequence)
    assert (moved.data.device.type, moved.sorted_indices.device.type) == ("meta", "meta")
    assert moved.batch_sizes is packed.batch_sizes
    assert mapped([packed], lambda value: value)[0] is packed
