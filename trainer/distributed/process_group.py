"""Set up and clean up the default process group: the only place that calls init_process_group."""

import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer import accelerator
from trainer.accelerator import is_accelerator
from trainer.config import DistributedConfig
from trainer.distributed import gpu_sharing, shrink
from trainer.distributed.collectives import backstop
from trainer.distributed.interfaces import address_towards, choose_interface, store_host
from trainer.distributed.links import check_links
from trainer.distributed.ranks import Ranks
from trainer.distributed.rendezvous import join, local_rank_and_size
from trainer.distributed.shrink import Shrunk
from trainer.errors import UserError
from trainer.failures.heartbeat import Heartbeat
from trainer.failures.neighbour import RankIdentity, introduction
from trainer.failures.stacks import Stacks
from trainer.failures.watch import Watch
from trainer.launch.new_process import has_launcher_on_host
from trainer.launch.rank_info import RankInfo, rank_info

log = logging.getLogger(__name__)

# Messages of gloo, and of the NCCL backend that is torch's default since 2.15 (pytorch PR 192281).
_COMMUNICATION_ERRORS = ("gloo/", "pair closure", "NCCLException", "NCCL operation timed out")


@contextmanager
def process_group(settings: DistributedConfig, both_ways: bool = False) -> Iterator[Ranks]:
    """Join the other processes like `watched_process_group`, for programs that don't need the watch."""
    with watched_process_group(settings, both_ways=both_ways) as (ranks, _):
        yield ranks


@contextmanager
def watched_process_group(
    settings: DistributedConfig,
    is_stopped: Callable[[], bool] = lambda: False,
    here: RankInfo | None = None,
    check_batch_sizes: Callable[[int], object] = lambda num_ranks: None,
    both_ways: bool = False,
) -> Iterator[tuple[Ranks, Watch]]:
    """Initialize the default process group and the watch; destroy the group unless the context raises.

    `rank_info` determines the ranks; a single process gets a group that opens no port. After an exception
    among several processes, nothing is torn down: other ranks may have ended, and a collective would wait for
    them and delay the exception.

    Args:
        is_stopped: returns whether a signal has requested a stop.
        here: the rank info to use instead of the launcher's.
        check_batch_sizes: raises UserError if the batch can't be divided among a number of ranks. The run
            then ends instead of continuing without the lost ranks.
        both_ways: whether two hosts must be able to connect in both directions, not only in the one that gloo
            uses.

    Yields:
        The rank of this process, and the watch, which monitors the other ranks.

    Raises:
        UserError: a device or backend is not available, the launcher's variables contradict each other, or
            there is no rendezvous address.
        RetryableError: ranks did not arrive within `distributed.timeout_s`, or hosts can't connect to each
            other; the message names them.
        Shrunk: other ranks died or hang, and this rank continues without them.
    """
    is_first, here = here is None, here or rank_info(settings)
    if here.world_size > 1 and sys.platform != "linux":
        raise UserError(
            f"on macOS, a run can have only one process, but this run has {here.world_size}; start only one"
        )
    heartbeat, stacks, listener = Heartbeat(), Stacks(), None
    identity = introduction(here.rank, heartbeat, stacks)
    identity["address"] = address_towards(store_host(here.init_method)) if here.world_size > 1 else None
    if settings.shrink:
        listener = shrink.listen_for_survivors(identity["address"])
        identity["rendezvous_port"] = listener.getsockname()[1]
    store, hosts, members = join(here, identity, timedelta(seconds=settings.timeout_s), is_stopped)
    identities = [RankIdentity(host=host, **member) for host, member in zip(hosts, members, strict=True)]
    watch = Watch(
        heartbeat,
        stacks,
        here.rank,
        identities,
        lambda: dist.PrefixStore("watch", store.clone()),
        settings.timeout_s,
        launched=has_launcher_on_host(here),
    )
    watch.start()
    try:
        addresses = [member["address"] for member in members]
        choose_interface(here.rank, hosts, addresses)
        names = [identity.hostname for identity in identities]
        check_links(store, here.rank, hosts, names, settings.timeout_s, both_ways)
        with shrink.connecting():
            joined = _join(settings, here, hosts, store)
        if listener is not None:
            if is_first:  # later, only survivors of a launcher that allows it get here
                shrink.check_launcher(here, joined.hosts)
            reason = shrink.unsupported(joined.device, joined.backend, addresses)
            if reason is None:
                watch.ending.let_shrink(shrink.cut, check_batch_sizes)
            elif joined.is_main:
                log.warning(
                    "distributed.shrink=true has no effect: %s; if a rank dies, the run ends, and a restart "
                    "continues it",
                    reason,
                )
        yield replace(joined, heartbeat=heartbeat), watch
    except GeneratorExit:
        raise
    except BaseException as caught:
        error = _without_system_exit(caught)
        if dist.is_initialized() and dist.get_world_size() == 1:  # no other ranks; a notebook may continue
            dist.destroy_process_group()
        survivors = watch.end_or_continue(error, symptom=_is_communication_error(error))
        if not survivors:
            if error is not caught:
                raise error from None
            raise
    else:
        dist.destroy_process_group()
        watch.ended_well()
        return
    dist.destroy_process_group()  # does not wait, because the connections are cut
    assert listener is not None and watch.ending.run_dir is not None
    raise Shrunk(shrink.rank_info_among(survivors, here, identities, listener), watch.ending.run_dir)


def _join(settings: DistributedConfig, here: RankInfo, hosts: list[int], store: dist.Store) -> Ranks:
    local_rank, local_world_size = local_rank_and_size(here, hosts)
    device, ranks_per_gpu = _device(settings, local_rank, local_world_size, hosts, here)
    backend = settings.backend or accelerator.backend_of(device)
    if "nccl" in backend and not (dist.is_nccl_available() and "nccl" in accelerator.backend_of(device)):
        raise UserError(f"distributed.backend={backend} requires CUDA, but the device is {device}; use gloo")
    if backend == "gloo" and is_accelerator(device) and here.world_size > 1:
        log.warning("distributed.backend=%s is slow on %s: it copies through host memory", backend, device)
    accelerator.use(device)  # before any use of a GPU; otherwise every rank opens a context on GPU 0
    rank, world_size = here.rank, here.world_size
    if ranks_per_gpu > 1:
        gpu_sharing.check_mps()
        if "nccl" in backend:
            nccl_version = torch.cuda.nccl.version()
            os.environ |= gpu_sharing.environment(
                nccl_version, ranks_per_gpu, rank, len(set(hosts)), os.environ
            )
    # A group that is bound to a device rejects tensors on other devices, which a model on several GPUs has.
    has_several = accelerator.found(device.type)[1] > local_world_size
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=backstop(settings.timeout_s),
        device_id=device if is_accelerator(device) and backend != "gloo" and not has_several else None,
    )
    return Ranks(rank, local_rank, world_size, local_world_size, tuple(hosts), device, backend, ranks_per_gpu)


def _without_system_exit(error: BaseException) -> BaseException:
    """Turn sys.exit() in user code into an error with a traceback, because other ranks wait for this rank."""
    if isinstance(error, SystemExit):
        failure = RuntimeError(f"sys.exit({error.code!r}) was called in the middle of the run")
        return failure.with_traceback(error.__traceback__)
    return error


def _is_communication_error(error: BaseException) -> bool:
    """Return whether another rank may have caused `error`; backends raise plain RuntimeErrors."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, dist.DistError) or any(text in str(current) for text in _COMMUNICATION_ERRORS):
            return True
        current = current.__cause__
    return False


def _device(
    settings: DistributedConfig, local_rank: int, local_world_size: int, hosts: list[int], here: RankInfo
) -> tuple[torch.device, int]:
    wanted = settings.device
    kind, num_gpus = accelerator.found(wanted)
    if wanted in ("cpu", "auto") and num_gpus == 0:
        return torch.device("cpu"), 1
    if num_gpus == 0:
        raise UserError(
            f"distributed.device={wanted}, but torch sees no GPU here; use distributed.device=cpu"
        )
    per_gpu = gpu_sharing.count_per_gpu(settings.ranks_per_gpu, num_gpus, hosts)
    if local_rank < num_gpus * per_gpu:
        return torch.device(kind, local_rank // per_gpu), per_gpu
    if num_gpus == 1 and not has_launcher_on_host(here):
        return torch.device(kind, 0), per_gpu  # srun --gpus-per-task shows each process only its own GPU
    raise UserError(
        f"local rank {local_rank} has no GPU of its own: this host has {num_gpus} GPU(s), and "
        f"distributed.ranks_per_gpu={per_gpu}; start at most {num_gpus * per_gpu} processes per host, let "
        f"ranks share a GPU with distributed.ranks_per_gpu={math.ceil(local_world_size / num_gpus)}, or use "
        "distributed.device=cpu"
    )
