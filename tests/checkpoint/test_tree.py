"""Split nested state into tensors and plain values, and put it together again."""

from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy
import pytest
import torch

from trainer.checkpoint.tree import put_together, take_apart
from trainer.errors import UserError

Pair = namedtuple("Pair", "a b")
ONE = torch.ones(2)


def test_state_comes_back_as_it_was():
    tree = {
        "x": {"n": 10**300, 1: ONE, "list": [ONE, (None, "text", 2.5)], "bytes": b"\x00\x01", "empty": b""},
        "y": {"counts": Counter("aab"), "type": torch.bfloat16, "ordered": OrderedDict(k=True)},
        "z": {"dollar": {"$tensor": "no"}, "inf": float("inf"), (2, 3): {"b": ONE}},
    }
    tensors, plain = take_apart(tree)
    assert tensors["z.(2, 3).b"].data_ptr() == ONE.data_ptr(), "nothing is copied"
    back = {key: put_together(value, tensors) for key, value in plain.items()}
    assert str(back) == str({**tree, "y": {**tree["y"], "ordered": {"k": True}}})


@pytest.mark.parametrize(
    "state",
    [{"a.b": ONE, "a": {"b": ONE}}, {1: ONE, "1": ONE}, {"a.b": b"1", "a": {"b": ONE}}],
    ids=["dots", "types of keys", "bytes"],
)
def test_two_tensors_with_the_same_path_are_refused(state):
    with pytest.raises(UserError, match=r"two tensors cannot be saved at the same path x\.(a\.b|1)"):
        take_apart({"x": state})


@pytest.mark.parametrize(
    "state",
    [Pair(1, ONE), defaultdict(int, a=1), numpy.longdouble("0.1"), take_apart],
    ids=["names", "default", "long double", "function"],
)
def test_values_that_would_change_their_type_are_refused(state):
    with pytest.raises(UserError, match=r"x\.state\S* cannot be saved"):
        take_apart({"x": {"state": state}})
