"""train.micro_batch_size=auto: the largest size that fits, found by making steps before the run is built.

What a try builds is thrown away, and the random generators are put back: a run that is given the number has
the same bits. Only under fsdp do ranks communicate in a try.
"""

import dataclasses
import gc
import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.accelerator import is_accelerator
from trainer.build.data import build_dataset, build_to_device, first_batch
from trainer.build.model import initial_model, wrap_model
from trainer.build.task import build_task
from trainer.config import Config
from trainer.data.loading.batch import split_batch
from trainer.distributed.agreement import Agreement
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError
from trainer.forward_backward import forward_backward
from trainer.model.trainable_parameters import TrainableParameters
from trainer.optim.param_groups import build_optimizer
from trainer.strategies.base import Strategy, grad_scaler
from trainer.strategies.build import build_strategy
from trainer.tasks import offers
from trainer.tasks.base import call_begin_step
from trainer.tensors.generators import generators_kept
from trainer.torch_private import num_collectives

log = logging.getLogger(__name__)

_SPARED = 0.1  # of a GPU's free memory: for fragments, larger batches and messages of collectives
_PATIENCE = 0.25  # of distributed.timeout_s: for ranks that wait in a collective for one without memory
_NO_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc", "could not create a memory")
_AUTO = "train.micro_batch_size=auto"


def with_micro_batch_size(config: Config, previous: int | None, ranks: Ranks) -> Config:
    """`config` with a number for train.micro_batch_size, if it is `auto` (a collective).

    A resumed run keeps its `previous` number, if that still divides what a rank has. Otherwise all samples of
    a rank are tried and, while any rank lacks memory, half as many.

    Raises:
        UserError: not even one sample fits; or, under fsdp, ranks ran out of memory at different points.
    """
    train = config.train
    if train.micro_batch_size != "auto":
        return config
    strategy = build_strategy(config, ranks)
    _end(strategy.forward_groups())
    most = split_batch(train.global_batch_size, None, strategy.num_replicas).local_size
    sizes, told = [size for size in range(most, 0, -1) if most % size == 0], ""
    size = previous if previous in sizes else None
    # Under fsdp, agree in a separate group, in which no collective of the model is pending.
    waits = strategy.fills_by_unit and size is None
    patience_s = _PATIENCE * config.distributed.timeout_s if waits else None
    agreement = Agreement(ranks, patience_s, in_time=True)
    while size is None:
        smaller = next((each for each in sizes if each <= sizes[0] // 2), None)
        rank = _first_without_memory(config, ranks, agreement, sizes[0], most, smaller or 1)
        if rank is None:
            size = sizes[0]
            log.info("%s: %d of the %d samples of a rank%s", _AUTO, size, most, told)
        else:
            told += f"; {sizes[0]} failed on {ranks.describe(rank)} (out of memory)"
            sizes = sizes[sizes.index(smaller) :] if smaller else []
        if not sizes:
            raise UserError(
                f"{_AUTO}: not even 1 sample fits{told}. A smaller model or sample does, or strategy=fsdp, "
                "strategy.activation_checkpointing=true or train.precision=bf16"
            )
    _end([] if agreement.group is None else [agreement.group])
    return dataclasses.replace(config, train=dataclasses.replace(train, micro_batch_size=size))


def _end(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy the process groups of a trial pass, each of which has a connection to every other rank."""
    for group in groups:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _first_without_memory(
    config: Config, ranks: Ranks, agreement: Agreement, size: int, most: int, smaller: int
) -> int | None:
    """Try `size` on all ranks; the first rank that lacked memory (a collective).

    Under fsdp a rank that lacks memory leaves the others in a collective. Ranks go on together only if all
    began equally many; otherwise the next collective of one would meet an older one of another.
    """
    strategy, fits = build_strategy(config, ranks), True
    groups, is_sharded = strategy.forward_groups(), strategy.fills_by_unit
    # Beside the parameters: the buckets of DDP, unless gradients lie in them, and the moving average.
    num_copies = strategy.copies_gradients + (config.ema.decay is not None)
    if not is_sharded and ranks.world_size > 1:
        strategy = Strategy(ranks.device, strategy.compute)  # the whole model, without the other ranks
    try:
        with generators_kept():
            _make_steps(config, strategy, ranks, size, 1 if size == most else 2, num_copies)
    except Exception as error:  # any but a lack of memory is left to the first step, which explains it
        words = str(error).lower()
        fits = not isinstance(error, MemoryError) and not any(lack in words for lack in _NO_MEMORY)
    gc.collect()
    if is_accelerator(ranks.device):
        torch.accelerator.empty_cache()
    mine = fits, [num_collectives(group) for group in groups]
    try:
        found = agreement.gather(mine)
    except RuntimeError:
        if fits:
            raise
        found = [(rank != ranks.rank, [rank]) for rank in range(ranks.world_size)]  # the others wait for it
    lacking = next((rank for rank, (has_room, _) in enumerate(found) if not has_room), None)
    if lacking is not None and any(begun != found[0][1] for _, begun in found):
        raise UserError(
            f"{_AUTO}: {ranks.describe(lacking)} ran out of memory with {size} samples where others did not, "
            f"and under fsdp they cannot try again together; set train.micro_batch_size={smaller} or less"
        )
    _end(groups)
    return lacking


def _make_steps(
    config: Config, strategy: Strategy, ranks: Ranks, size: int, num_micro_batches: int, num_copies: int
) -> None:
    """Two steps on the first samples: only in the second is the optimizer's state beside activations."""
    task, train_set = build_task(config), build_dataset(config.data, "train")
    batch = first_batch(config, train_set, size)
    to_device = build_to_device(config, ranks.device, train_set)
    model = initial_model(config, train_set, ranks if strategy.fills_by_unit else None)
    module = wrap_model(config, model, strategy)
    owned, scaler = strategy.unwrap(module), grad_scaler(strategy)
    trained = TrainableParameters(owned)
    optimizer = build_optimizer(trained, config.optim)
    beside = [torch.empty_like(parameter) for parameter in owned.parameters() for _ in range(num_copies)]
    if is_accelerator(ranks.device):
        free, _ = torch.accelerator.get_memory_info(ranks.device)
        beside.append(torch.empty(int(_SPARED * free), dtype=torch.uint8, device=ranks.device))
    module.train()

    def scaled(loss: Tensor, _: Any) -> Tensor:
        return scaler.scale(loss)

    for step in (1, 2):
        if offers(task, "begin_step"):
            call_begin_step(task, step, 2, owned)
        strategy.begin_step(module)
        for number in range(1, num_micro_batches + 1):
            is_last = number == num_micro_batches
            forward_backward(strategy, task, module, to_device(batch), scaled, is_last=is_last)
        strategy.aggregate(module)
        trained.attach_gradients()
        optimizer.step()
        trained.drop_gradients()
    del beside
