"""DistributedDataParallel: a whole model on every rank, gradients averaged bucket by bucket."""

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from trainer.comm.ddp_hook import CommHook, attach
from trainer.config import AutoCommConfig, CommConfig, DdpConfig, HookCommConfig
from trainer.distributed.collectives import broadcast_tensors
from trainer.distributed.process_group import Dist
from trainer.errors import UserError, first_few
from trainer.optim.optimizer_checks import sparse_weights
from trainer.optim.train_state import TrainState
from trainer.strategies.base import Computing, Fill, Strategy
from trainer.strategies.ddp_comm import auto_choice, hook_options, users_hook
from trainer.strategies.gradient_hooks import (
    hooked_parameters,
    hooks_per_rank_note,
    without_gradient_hooks,
)
from trainer.strategies.shardable import refuse_max_norm

log = logging.getLogger(__name__)

_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
_SENDS_NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers": False
}


class Ddp(Strategy):
    def __init__(
        self,
        settings: DdpConfig,
        comm: CommConfig,
        dist: Dist,
        computing: Computing,
        timeout_s: float,
    ) -> None:
        super().__init__(dist.device, computing)
        self.settings, self.comm, self.hosts, self.timeout_s = settings, comm, dist.hosts, timeout_s
        self.heartbeat = dist.heartbeat
        self.hook: CommHook | None = None
        self.num_replicas, self.replica = dist.world_size, dist.rank
        self._hooked: set[str] | None = None  # names of parameters with hooks on their gradients
        self._local: _LocalGradients | None = None  # in a pass whose reduction is repeated
        self._passes_to_repeat = 0  # in a resumed run, until DDP has rebuilt its buckets
        if settings.sync_batchnorm and dist.device.type != "cuda":
            raise UserError("strategy.sync_batchnorm=true needs CUDA: torch has no CPU kernel for it")
        # MPI has no store, in which the ranks could meet for a gloo group.
        if dist.backend == "mpi" and hook_options(comm) is not None:
            raise UserError(
                f"comm={comm.algorithm} needs gloo beside distributed.backend=mpi, which mpirun does not "
                "provide; use comm=native comm.wire_dtype=fp32 comm.timeline=false"
            )

    def wrap(self, model: nn.Module, fill: Fill = lambda module: None) -> nn.Module:
        fill(model)
        if self.settings.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = self.move_to_devices(model)
        if self.computing.compile:
            # Not DDP's wrapper, at whose bookkeeping torch would stop compiling before it reaches the module.
            # The graph is still split at the bucket borders, since torch compiles it when DDP calls it.
            model.compile(mode=self.computing.compile_mode)
        if self.num_replicas > 1:  # a single rank has no peers
            self._hooked = hooked_parameters(model)
            if self._hooked:
                self.notes.append(hooks_per_rank_note(self._hooked, "ddp"))
            refuse_max_norm(model, "strategy=ddp", "on each rank by its own data")
            self.order.attach(model, reduces=True)
            self._trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            # Not by DDP, which cannot send int16 or float8.
            broadcast_tensors([*model.parameters(), *model.buffers()], src=0)
            model = DistributedDataParallel(
                model,
                device_ids=device_ids(self.devices),
                gradient_as_bucket_view=self.settings.gradient_as_bucket_view,
                static_graph=self.settings.static_graph,
                find_unused_parameters=self.settings.find_unused_parameters,
                init_sync=False,
                **_SENDS_NO_BUFFERS,
                **_bucket_sizes(self.settings.first_bucket_mb, self.settings.bucket_cap_mb),
            )
            if isinstance(self.comm, AutoCommConfig):
                self.comm = auto_choice(self.comm, model.module, self.hosts)
            self.algorithm = self.comm.algorithm
            options = hook_options(self.comm, always=self.order.by_leaves)
            if options is not None:
                self._refuse_sparse(model.module)
                if isinstance(self.comm, HookCommConfig):
                    options["hook"] = users_hook(self.comm.hook)
                    if self.comm.hook.get("state") is not None:
                        self.notes.append(
                            "comm=hook: no checkpoint holds its state: a resumed run starts with a new one "
                            "(PowerSGD: without error feedback), and is not exact"
                        )
                options |= {"hosts": self.hosts, "timeout_s": self.timeout_s, "enter": self.heartbeat.enter}
                options["leaf_sums"] = self.order.sums
                try:
                    self.hook = attach(model, self.comm.algorithm, **options)
                    self.timeline = self.hook.timeline
                except ValueError as error:
                    raise UserError(f"comm={self.comm.algorithm}: {error}") from error
        else:
            self.order.attach(model)
        return model

    def _refuse_sparse(self, model: nn.Module) -> None:
        sparse = sparse_weights(model)
        if names := [name for name, parameter in model.named_parameters() if parameter in sparse]:
            raise UserError(
                f"comm={self.comm.algorithm} adds up dense gradients, but those of {first_few(names, 3)} are "
                "sparse, which only DDP itself adds; build the embedding with sparse=False, or use "
                "comm=native comm.timeline=false, in fp32 and without train.exact"
            )

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def prepare(self, state: TrainState) -> None:
        # DDP rebuilds its buckets in the order in which the first backward pass filled them (with a static
        # graph, the second). The place of an element decides the order in which an all-reduce adds the
        # ranks' values, and so its last bit: a resumed run repeats a pass's reduction in the rebuilt buckets.
        passes = 2 if self.settings.static_graph else 0 if self.settings.find_unused_parameters else 1
        if not self.order.by_leaves:  # integers have the same sum in any order
            self._passes_to_repeat = min(state.progress.step, passes)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        with super().autocast():
            try:
                yield
            except AttributeError as error:
                wrapper, name = error.obj, error.name
                if not isinstance(wrapper, DistributedDataParallel) or not hasattr(wrapper.module, str(name)):
                    raise
                raise UserError(
                    f"strategy=ddp: the loss uses model.{name}, but gradients are averaged over ranks only "
                    "in a call of the model itself: let its forward() do so and call model(...), or return "
                    "the loss from forward(), for data.task._target_=trainer.tasks.OwnLoss"
                ) from error
        if self._local is not None:
            self._local.begin()

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager:
        if not isinstance(model, DistributedDataParallel):
            return self.order.leaf(enabled)
        if self.settings.static_graph and not enabled:
            raise UserError(
                "strategy.static_graph=true, but a step has several micro-batches, which DDP then cannot add "
                "up; set strategy.static_graph=false, or train.micro_batch_size=null"
            )
        return self._pass(model, enabled)

    @contextmanager
    def _pass(self, model: DistributedDataParallel, last: bool) -> Iterator[None]:
        if not self.order.by_leaves:  # DDP itself knows no later buffers, and skips a pass after no_grad()
            self.sync_buffers(model)
        if last and self.settings.find_unused_parameters and self.order.sums is not None:
            self.order.sums.begin_last_leaf()
        with self.order.leaf(last), self._reduced(model) if last else model.no_sync():
            yield
        if self._hooked is not None:  # the first pass, in which a forward pass may have registered some
            late = hooked_parameters(model.module) - self._hooked
            self._hooked = None
            if late:
                log.warning("%s", hooks_per_rank_note(late, "ddp"))

    @contextmanager
    def _reduced(self, model: DistributedDataParallel) -> Iterator[None]:
        with self.hook.plain_errors() if self.hook is not None else nullcontext(), self._all_used(model):
            if not self._passes_to_repeat:
                yield
                return
            self._local = _LocalGradients(model.module)
            yield
            gradients, self._local = self._local.end(), None
            for _ in range(self._passes_to_repeat):
                _reduce_again(model, gradients)
            self._passes_to_repeat = 0

    @contextmanager
    def _all_used(self, model: DistributedDataParallel) -> Iterator[None]:
        """Around a backward pass: a parameter without a gradient blocks its bucket, and those after it.

        Raises:
            UserError: only on this rank, while others may wait for its buckets.
        """
        if self.settings.static_graph or self.settings.find_unused_parameters:
            yield
            return
        before = [_written(parameter) for _, parameter in self._trained]
        yield
        if idle := [name for (name, p), was in zip(self._trained, before, strict=True) if _written(p) == was]:
            raise UserError(
                f"strategy=ddp: the loss of rank {self.replica} used no {first_few(idle, 3)}, and DDP "
                "waits for the gradient of each parameter; set strategy.find_unused_parameters=true, or "
                "remove what is never used from the model, or freeze it (model.freeze)"
            )

    def replica_groups(self) -> list[tuple[int, ...]]:
        return [tuple(range(self.num_replicas))] if self.num_replicas > 1 else []

    def measured(self) -> dict[str, Any]:
        # The messages of a user's hook need not be its buckets.
        wire_dtype = (hook_options(self.comm) or {}).get("wire_dtype")
        typical = self.timeline.typical_pass() if self.timeline is not None and wire_dtype is not None else {}
        facts = {"device": self.device.type, "hosts": list(self.hosts), "wire_dtype": wire_dtype}
        return {"timeline": facts | typical} if typical else {}

    def close(self) -> None:
        if self.hook is not None:
            self.hook.close()


def device_ids(devices: Sequence[torch.device]) -> list[torch.device] | None:
    """DDP's argument: the one GPU of a model; None on CPUs, and for a model on several devices."""
    return list(devices) if len(devices) == 1 and devices[0].type == "cuda" else None


def _written(parameter: nn.Parameter) -> Any:
    """A value that changes when a backward pass adds to the gradient of `parameter`; None without one."""
    gradient = parameter.grad
    if gradient is None:
        return None
    return object() if gradient.is_sparse else (gradient.data_ptr(), gradient._version)


class _LocalGradients:
    """Copies of this rank's gradients, in the order in which a backward pass computes them.

    A gradient that comes in several parts is listed several times; the last is complete.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._found: list[tuple[nn.Parameter, Tensor]] = []
        self._handles: list[RemovableHandle] = []

    def begin(self) -> None:
        """Called after the loss, whose forward pass may have registered hooks that come first."""
        self._handles = [p.register_post_accumulate_grad_hook(self._copy) for p in self._parameters]

    def _copy(self, parameter: Any) -> None:
        self._found.append((parameter, parameter.grad.clone()))

    def end(self) -> list[tuple[nn.Parameter, Tensor]]:
        for handle in self._handles:
            handle.remove()
        return self._found


def _reduce_again(model: DistributedDataParallel, gradients: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Have `model` reduce `gradients`, those of its last pass, in the buckets of the next (a collective).

    No user code runs: not the model's, which is replaced, and no hook on a gradient.
    """
    given = dict(gradients)
    for parameter in given:
        parameter.grad = None
    users, model.module = model.module, nn.Identity()
    try:
        model(torch.zeros((), device=gradients[0][1].device))
    finally:
        model.module = users
    with without_gradient_hooks(given):
        for parameter, gradient in gradients:
            parameter.backward(gradient if gradient is given[parameter] else torch.zeros_like(gradient))


def _bucket_sizes(first_mb: float, cap_mb: float) -> dict[str, Any]:
    """DDP's arguments for the size of the first bucket; torch before 2.15 has only the default pair."""
    if (first_mb, cap_mb) == (1, 25):
        return {}
    if first_mb == cap_mb:
        return {"bucket_cap_mb": cap_mb}
    if "bucket_cap_mb_list" in _ARGUMENTS:
        return {"bucket_cap_mb_list": [first_mb, cap_mb]}
    raise UserError(
        f"strategy.first_bucket_mb={first_mb} with bucket_cap_mb={cap_mb}: torch {torch.__version__} allows "
        "another size of the first bucket only as the pair 1 and 25; make the two equal"
    )
