"""Models with state other than the parameters and buffers that they are built with."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.user_parts import Tiny

# By kind: what `get_extra_state` makes of a count, and what makes the count of it again.
EXTRA: dict[str, tuple[Any, Any]] = {
    "int": (lambda n: n, lambda state: state),
    "dict": (lambda n: {"passes": n, "seen": [n, None, ("a", 0.5)], 3: "$x"}, lambda state: state["passes"]),
    "bytes": (lambda n: b"\0\xff" * n, lambda state: state.count(b"\0\xff")),
    "tensor": (lambda n: torch.ones(n), lambda state: len(state)),
    "tensors": (lambda n: {"of": [torch.ones(n, 2)], "n": n}, lambda state: state["of"][0].shape[0]),
}


class Counting(Tiny):
    """The output depends on the number of calls, which is kept as extra state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.passes = kind, 0

    def forward(self, rows: Tensor) -> Tensor:
        self.passes += self.training
        return super().forward(rows) * (1 + self.passes / 10)

    def get_extra_state(self) -> Any:
        return EXTRA[self.kind][0](self.passes)

    def set_extra_state(self, state: Any) -> None:
        self.passes = EXTRA[self.kind][1](state)


class Renamed(Tiny):
    """Saves a weight under another name, but does not load it from there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_rename)


def _rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}kernel"] = state.pop(f"{prefix}layers.0.weight")


def _rename_back(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}layers.0.weight"] = state.pop(f"{prefix}kernel")


class Rounded(Tiny):
    """Saves a weight in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_round)


def _round(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}layers.0.weight"] = state[f"{prefix}layers.0.weight"].half()


class OneWay(Tiny):
    """Returns extra state, but does not load any."""

    def get_extra_state(self) -> int:
        return 1


class Keeps(Tiny):
    """Returns extra state of a type that checkpoints do not support."""

    def get_extra_state(self) -> Any:
        return {"seen": {1, 2}}

    def set_extra_state(self, state: Any) -> None: ...


class Late(Tiny):
    """Registers a buffer in its first forward pass in training, or resizes one."""

    def __init__(self, grows: bool, persistent: bool) -> None:
        super().__init__()
        self.grows, self.persistent = grows, persistent
        if grows:
            self.register_buffer("cache", torch.zeros(1), persistent)

    def forward(self, rows: Tensor) -> Tensor:
        if self.training and self.grows:
            self.cache = torch.zeros(len(self.cache) + 1)
        elif self.training:
            self.register_buffer("cache", torch.zeros(3), self.persistent)
        return super().forward(rows)


class Averaging(Tiny):
    """Has buffers that start as one tensor, and are replaced in each pass."""

    def __init__(self) -> None:
        super().__init__()
        begin = torch.zeros(6)
        for name in ("mean", "square"):
            self.register_buffer(name, begin, persistent=name == "mean")

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * rows.detach().mean(0)
            self.square = 0.9 * self.square + 0.1 * rows.detach().square().mean(0)
        return super().forward((rows - self.mean) / (self.square + 0.1))


class AllThatIsRight(nn.Module):
    """Has state of each supported kind; hooks rename a weight on saving and on loading."""

    def __init__(self) -> None:
        super().__init__()
        late = Late(grows=True, persistent=False)
        self.parts = nn.ModuleList([*(Counting(kind) for kind in EXTRA), late, Averaging()])
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.register_state_dict_post_hook(_rename)
        self.register_load_state_dict_pre_hook(_rename_back)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers[0](sum(part(rows) for part in self.parts))
