"""Batch norms whose weights are frozen use their running statistics."""

from functools import partial

from torch import nn


def keep_frozen_statistics(model: nn.Module) -> None:
    """Keep a batch norm whose weights are all frozen in evaluation mode, even after `model.train()`.

    It then keeps and uses its running statistics, until its weights are made trainable. Other layers, such as
    dropout, behave as in training.
    """
    for module in model.modules():
        own = [parameter.requires_grad for parameter in module.parameters(recurse=False)]
        if getattr(module, "running_mean", None) is not None and own and not any(own):
            module.eval()
            module.train = partial(_train_unless_frozen, module)  # type: ignore[method-assign]


def follow_frozen_statistics(model: nn.Module) -> None:
    """Update the mode of those batch norms after their weights were frozen or made trainable."""
    for module in model.modules():
        if getattr(vars(module).get("train"), "func", None) is _train_unless_frozen:
            module.train()


def _train_unless_frozen(module: nn.Module, mode: bool = True) -> nn.Module:
    is_trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return type(module).train(module, mode and is_trained)
