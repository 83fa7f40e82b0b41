"""Find the largest micro-batch that fits in memory, by running trial steps (`train.micro_batch_size=auto`).

A trial restores the random generators, so the run is bit-identical to a run that sets
`train.micro_batch_size` to the size found.
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

_RESERVE = 0.1  # fraction of a GPU's free memory kept for fragmentation, larger batches and collectives
_PATIENCE = 0.25  # fraction of distributed.timeout_s that ranks wait for a rank that ran out of memory
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc", "could not create a memory")
_AUTO = "train.micro_batch_size=auto"


def with_micro_batch_size(config: Config, previous: int | None, ranks: Ranks) -> Config:
    """Replace `train.micro_batch_size=auto` in `config` with a number, and return the result (a collective).

    A resumed run keeps its `previous` size if it still divides the samples per rank. Otherwise, the first
    trial uses all samples of a rank, and each further trial at most half as many, until every rank has enough
    memory.
    """
    train = config.train
    if train.micro_batch_size != "auto":
        return config
    strategy = build_strategy(config, ranks)
    _destroy(strategy.forward_groups())
    local_size = split_batch(train.global_batch_size, None, strategy.num_replicas).local_size
    sizes = [size for size in range(local_size, 0, -1) if local_size % size == 0]
    failed_trials = ""
    size = previous if previous in sizes else None
    # Under fsdp, agree in a separate group, in which no collective of the model is pending.
    waits = strategy.fills_by_unit and size is None
    patience_s = _PATIENCE * config.distributed.timeout_s if waits else None
    agreement = Agreement(ranks, patience_s, in_time=True)
    while size is None:
        smaller = next((each for each in sizes if each <= sizes[0] // 2), None)
        rank = _first_without_memory(config, ranks, agreement, sizes[0], local_size, smaller or 1)
        if rank is None:
            size = sizes[0]
            log.info("%s: chose %d of %d samples per rank%s", _AUTO, size, local_size, failed_trials)
        else:
            failed_trials += f"; {sizes[0]} failed on {ranks.describe(rank)} (out of memory)"
            sizes = sizes[sizes.index(smaller) :] if smaller else []
        if not sizes:
            raise UserError(
                f"{_AUTO}: not even 1 sample fits in memory{failed_trials}. Use a smaller model or smaller "
                "samples, or set strategy=fsdp, strategy.activation_checkpointing=true or "
                "train.precision=bf16"
            )
    _destroy([] if agreement.group is None else [agreement.group])
    return dataclasses.replace(config, train=dataclasses.replace(train, micro_batch_size=size))


def _destroy(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy the process groups of a trial, because each group keeps connections to the other ranks open."""
    for group in groups:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _first_without_memory(
    config: Config, ranks: Ranks, agreement: Agreement, size: int, local_size: int, smaller: int
) -> int | None:
    """Try `size` on all ranks; return the first rank that runs out of memory, or None (a collective).

    Ranks communicate only under fsdp, where a rank that runs out of memory leaves the others waiting in a
    collective. Another trial is possible only if all ranks started the same number of collectives. Otherwise,
    a rank's next collective would match an older collective of another rank.
    """
    strategy, fits = build_strategy(config, ranks), True
    groups, is_sharded = strategy.forward_groups(), strategy.fills_by_unit
    # Copies of the parameters: the buckets of DDP, unless gradients are views of them; the moving average.
    num_copies = strategy.copies_gradients + (config.ema.decay is not None)
    if not is_sharded and ranks.world_size > 1:
        strategy = Strategy(ranks.device, strategy.compute)  # no communication
    try:
        with generators_kept():
            _make_steps(config, strategy, ranks, size, 1 if size == local_size else 2, num_copies)
    except Exception as error:  # other errors occur again in the dry run, which explains them
        message = str(error).lower()
        fits = not isinstance(error, MemoryError) and not any(text in message for text in _OUT_OF_MEMORY)
    gc.collect()
    if is_accelerator(ranks.device):
        torch.accelerator.empty_cache()
    result = fits, [num_collectives(group) for group in groups]
    try:
        results = agreement.gather(result)
    except RuntimeError:
        if fits:
            raise
        # The other ranks wait in a collective of the model: report this rank as the one without memory.
        results = [(rank != ranks.rank, [rank]) for rank in range(ranks.world_size)]
    failed = next((rank for rank, (has_room, _) in enumerate(results) if not has_room), None)
    if failed is not None and any(started != results[0][1] for _, started in results):
        raise UserError(
            f"{_AUTO}: {ranks.describe(failed)} ran out of memory with {size} samples but other ranks did "
            "not, and fsdp cannot recover from that to try a smaller size; set "
            f"train.micro_batch_size={smaller} or less"
        )
    _destroy(groups)
    return failed


def _make_steps(
    config: Config, strategy: Strategy, ranks: Ranks, size: int, num_micro_batches: int, num_copies: int
) -> None:
    """Run two steps on the first samples; only the second has optimizer state during its passes."""
    task, train_set = build_task(config), build_dataset(config.data, "train")
    batch = first_batch(config, train_set, size)
    to_device = build_to_device(config, ranks.device, train_set)
    model = initial_model(config, train_set, ranks if strategy.fills_by_unit else None)
    module = wrap_model(config, model, strategy)
    owned, scaler = strategy.unwrap(module), grad_scaler(strategy)
    trained = TrainableParameters(owned)
    optimizer = build_optimizer(trained, config.optim)
    reserved = [torch.empty_like(parameter) for parameter in owned.parameters() for _ in range(num_copies)]
    if is_accelerator(ranks.device):
        free, _ = torch.accelerator.get_memory_info(ranks.device)
        reserved.append(torch.empty(int(_RESERVE * free), dtype=torch.uint8, device=ranks.device))
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
    del reserved
