"""What users should know of gradients: which parameters have hooks, and which a loss left out."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from trainer.errors import first_few


def has_gradient_hook(tensor: Tensor) -> bool:
    """Whether register_hook or register_post_accumulate_grad_hook was called; torch has no public check."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def hooked_parameters(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if has_gradient_hook(parameter)}


def hooks_per_rank_note(names: Iterable[str], strategy: str) -> str:
    """For the user: hooks on the gradients of the parameters of these names run before ranks are averaged."""
    return (
        f"{strategy}: hooks on the gradients of {', '.join(sorted(names)[:5])} get each rank's own, "
        "before it is averaged over ranks, so the result depends on the number of ranks"
    )


def hooks_per_micro_batch_note(names: Iterable[str]) -> str:
    """For the user: these hooks run once for each of several micro-batches."""
    return (
        f"hooks on the gradients of {', '.join(sorted(names)[:5])} get those of each micro-batch, "
        "before all are added, so the result depends on train.micro_batch_size"
    )


def not_all(idle: Sequence[str]) -> str:
    """That a loss left out the parameters of these names, if they are known, and the way out."""
    return (
        f"{'no ' + first_few(idle, 3) if idle else 'not all parameters'}, and DDP waits for the gradient of "
        "each parameter; set strategy.find_unused_parameters=true, or remove what is never used from the "
        "model, or freeze it (model.freeze). Within torch.utils.checkpoint of inputs without gradients "
        "nothing is used either, unless use_reentrant=False"
    )
