"""Batch norms with frozen weights, which use their running statistics."""

from functools import partial

from torch import nn


def keep_frozen_statistics(model: nn.Module) -> None:
    """Keep batch norms whose weights are all frozen in evaluation mode, even after `model.train()`.

    They use their running statistics, and do not update them, until their weights are made trainable. Other
    layers, such as dropout, are not affected.
    """
    for module in model.modules():
        own = [parameter.requires_grad for parameter in module.parameters(recurse=False)]
        if getattr(module, "running_mean", None) is not None and own and not any(own):
            module.eval()
            module.train = partial(_train_unless_frozen, module)  # type: ignore[method-assign]


def follow_frozen_statistics(model: nn.Module) -> None:
    """Set batch norms to training or evaluation mode after their weights were made trainable or frozen."""
    for module in model.modules():
        if getattr(vars(module).get("train"), "func", None) is _train_unless_frozen:
            module.train()


def _train_unless_frozen(module: nn.Module, mode: bool = True) -> nn.Module:
    is_trainable = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return type(module).train(module, mode and is_trainable)
