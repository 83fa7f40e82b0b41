"""Which optimizers are supported, with which of their options, and on which parameters."""

import inspect
from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Optimizer, Rprop, SparseAdam

from trainer.errors import UserError
from trainer.local_shard import is_dtensor
from trainer.nested import leaves
from trainer.optim.layout import is_dense


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise UserError, with the way out, for an optimizer that would fail at its first step of `model`, or
    would not resume in the state in which it stopped.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optim is a {name}; it must be a torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserError(
            f"optim: {name} evaluates the loss several times within a step, but this trainer only once; use "
            "optim=adamw, or any optimizer whose step() needs no closure"
        )
    optimized: set[Tensor] = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if (kept := _outside_of_state(optimizer, optimized)) is not None:
        raise UserError(
            f"optim: {name} keeps tensors in its attribute {kept}, which no checkpoint holds; let it keep "
            "them in self.state, under a parameter or a name"
        )
    sparse = sparse_weights(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    takes_sparse = isinstance(optimizer, SGD | SparseAdam | Adagrad) or not _is_torchs(optimizer)
    if isinstance(optimizer, SGD | Adagrad) and any(
        group["weight_decay"] for group in optimizer.param_groups
    ):
        takes_sparse, name = False, f"{name} with weight_decay"  # weight decay of all rows is dense
    if not takes_sparse and (found := [names[p] for p in names if p in optimized & sparse]):
        raise UserError(
            f"optim: {name} takes no sparse gradients, but {found[0]} has them; build its embedding with "
            "sparse=False, or use optim=sgd optim.momentum=0 optim.weight_decay=0"
        )
    _check_choices(optimizer, names, optimized)


def _check_choices(optimizer: Optimizer, names: Mapping[nn.Parameter, str], optimized: set[Tensor]) -> None:
    """Raise UserError for options or state of `optimizer` that torch does not support here."""
    name, sharded = type(optimizer).__name__, [p for p in optimized if is_dtensor(p)]
    chosen = {key for group in optimizer.param_groups for key, value in group.items() if value is True}
    if sharded and isinstance(optimizer, Adafactor):
        raise UserError(
            "optim: Adafactor keeps sums over rows and columns, which torch cannot compute for sharded "
            "parameters; use strategy=ddp, or optim=adamw"
        )
    unsharded = {"fused": isinstance(optimizer, SGD | Adagrad), "foreach": isinstance(optimizer, Rprop)}
    if found := [key for key in unsharded if sharded and unsharded[key] and key in chosen]:
        raise UserError(
            f"optim.{found[0]}=true: torch has no such step of {name} for sharded parameters; leave it out, "
            "or use strategy=ddp, or optim=adamw"
        )
    odd = [names[p] for p in names if p in optimized and p.is_cpu and not is_dense(p)]
    if "fused" in chosen and odd:
        raise UserError(
            f"optim.fused=true: {odd[0]} is a view with gaps or in another order, which torch's kernel takes "
            "for a contiguous one; leave it out, or make the parameter contiguous"
        )


def sparse_weights(model: nn.Module) -> set[Tensor]:
    """The parameters with sparse gradients."""
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }


def _outside_of_state(optimizer: Optimizer, optimized: set[Tensor]) -> str | None:
    """The name of an attribute with tensors, or with a stateful optimizer, that is not in `state_dict`."""
    if type(optimizer).state_dict is not Optimizer.state_dict:
        return None

    def is_own(value: object) -> bool:
        if isinstance(value, Optimizer):
            return value.state is not optimizer.state
        return isinstance(value, Tensor) and value not in optimized

    known = {"state", "param_groups", "defaults"}
    values = {name: value for name, value in vars(optimizer).items() if name not in known}
    return next((name for name, value in values.items() if any(map(is_own, leaves(value)))), None)


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.")
