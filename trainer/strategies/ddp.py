"""DistributedDataParallel: every rank has the whole model, and buckets of gradients are averaged."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.accelerator import is_accelerator
from trainer.comm.ddp_hook import CommHook, attach
from trainer.config import AutoCommConfig, CommConfig, DdpConfig, HookCommConfig
from trainer.distributed.collectives import broadcast_tensors
from trainer.distributed.ranks import Ranks
from trainer.distributed.shrink import connecting
from trainer.errors import UserError, first_few
from trainer.optim.optimizers import sparse_weights
from trainer.strategies.base import ComputeOptions, Fill, Phase, Strategy
from trainer.strategies.ddp_comm import auto_choice, hook_options, users_hook
from trainer.strategies.placement import unused_parameters

_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers": False
}


class Ddp(Strategy):
    name = "ddp"

    def __init__(
        self,
        settings: DdpConfig,
        comm: CommConfig,
        ranks: Ranks,
        compute: ComputeOptions,
        timeout_s: float,
    ) -> None:
        super().__init__(ranks.device, compute)
        self.settings, self.comm, self.hosts, self.timeout_s = settings, comm, ranks.hosts, timeout_s
        self.heartbeat = ranks.heartbeat
        self.hook: CommHook | None = None
        self._sums_sparse = ranks.backend in ("gloo", "mpi") or not is_accelerator(ranks.device)
        self.num_replicas, self.replica = ranks.world_size, ranks.rank
        is_free = settings.find_unused_parameters or settings.static_graph or ranks.world_size == 1
        self.uses = "any" if is_free else "all"
        self.copies_gradients = not settings.gradient_as_bucket_view
        # With a static graph, torch builds its buckets in the second pass.
        self.num_dry_runs = 2 if settings.static_graph else 1
        if settings.sync_batchnorm and not is_accelerator(ranks.device):
            raise UserError("strategy.sync_batchnorm=true needs a GPU; torch has no CPU kernel for it")

    def wrap(self, model: nn.Module, fill: Fill = lambda module: None) -> nn.Module:
        fill(model)
        if self.settings.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = self._place(model)
        if self.compute.compile:
            # Compile the module, not DDP's wrapper, whose Python code would break the graph before it reaches
            # the module. torch still splits the graph at bucket borders, since DDP calls the module.
            model.compile(mode=self.compute.compile_mode)
        if self.num_replicas > 1:  # a single rank has no peers
            self.order.attach(model, reduces=True)
            # DDP's own broadcast cannot send int16 or float8.
            broadcast_tensors([*model.parameters(), *model.buffers()], src=0)
            self._reduced_parameters = _trainable(model)
            model = DistributedDataParallel(model, **self._options())
            if isinstance(self.comm, AutoCommConfig):
                self.comm = auto_choice(self.comm, model.module, self.hosts)
            self.algorithm = self.comm.algorithm
            options = hook_options(self.comm, always=self.order.by_chunks)
            if options is not None or not self._sums_sparse:
                self._refuse_sparse(model.module)
            if options is not None:
                if isinstance(self.comm, HookCommConfig):
                    options["hook"] = users_hook(self.comm.hook)
                    if self.comm.hook.get("state") is not None:
                        self.notes.append(
                            "comm=hook: checkpoints do not contain the hook's state, so a resumed run starts "
                            "with a new state (PowerSGD: without error feedback) and is not exact"
                        )
                options |= {"hosts": self.hosts, "timeout_s": self.timeout_s, "enter": self.heartbeat.enter}
                options["chunk_sums"] = self.order.sums
                with connecting():
                    self.hook = attach(model, self.comm.algorithm, **options)
                self.report = self.hook.timeline
        else:
            self.order.attach(model)
        return model

    def _options(self) -> dict[str, Any]:
        return {
            "device_ids": device_ids(self.devices),
            "gradient_as_bucket_view": self.settings.gradient_as_bucket_view,
            "static_graph": self.settings.static_graph,
            "find_unused_parameters": self.settings.find_unused_parameters,
            "init_sync": False,
            **_NO_BUFFER_SYNC,
            # None is torch's default, whose first bucket is smaller so that it is sent early.
            "bucket_cap_mb": None if self.settings.bucket_cap_mb == 25 else self.settings.bucket_cap_mb,
        }

    def follow_trainable(self, model: nn.Module) -> bool:
        super().follow_trainable(model)
        if not isinstance(model, DistributedDataParallel):
            return False
        trainable, known = _trainable(model.module), self._reduced_parameters
        if trainable == known or (self.settings.find_unused_parameters and trainable < known):
            return False
        # In place, because other objects refer to the wrapper, and DDP registers parameters only here.
        model.__init__(model.module, **self._options())  # type: ignore[misc]
        if self.hook is not None:
            model.register_comm_hook(None, self.hook.reduce)
        self._reduced_parameters = trainable
        return True

    def _refuse_sparse(self, model: nn.Module) -> None:
        sparse = sparse_weights(model)
        if names := [name for name, parameter in model.named_parameters() if parameter in sparse]:
            raise UserError(
                f"comm={self.comm.algorithm} supports only dense gradients, but those of "
                f"{first_few(names, 3)} are sparse; build the embedding with sparse=False, or set "
                f"comm=native comm.timeline=false{'' if self._sums_sparse else ' distributed.backend=gloo'}, "
                "with which DDP adds sparse gradients (in fp32 and without train.exact)"
            )

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def explain(self, error: Exception, phase: Phase) -> UserError | None:
        wrapper, name = getattr(error, "obj", None), str(getattr(error, "name", None))
        if isinstance(wrapper, DistributedDataParallel) and hasattr(wrapper.module, name):
            used = f"model.{name}"
        elif isinstance(error, TypeError) and f"'{DistributedDataParallel.__name__}'" in str(error):
            used = "model[...], len(model) or similar"  # the wrapper is not a container
        else:
            return None
        return UserError(
            f"strategy=ddp: the loss uses {used}, but gradients are averaged over ranks only when the "
            "model itself is called; move that code to forward() and call model(...), or return the loss "
            "from forward() and set data.task._target_=trainer.tasks.OwnLoss"
        )

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager:
        if not isinstance(model, DistributedDataParallel):
            return self.order.chunk(enabled)
        if self.settings.static_graph and not enabled:
            raise UserError(
                "strategy.static_graph=true is not supported with several micro-batches in a step, because "
                "DDP cannot accumulate gradients with a static graph; set strategy.static_graph=false, or "
                "train.micro_batch_size=null"
            )
        return self._pass(model, enabled)

    @contextmanager
    def _pass(self, model: DistributedDataParallel, last: bool) -> Iterator[None]:
        if last and self.settings.find_unused_parameters and self.order.sums is not None:
            self.order.sums.start_last_chunk()
        reduced = self._reduced(model.module, self.hook) if last and self.hook is not None else nullcontext()
        with self.order.chunk(last), reduced, nullcontext() if last else model.no_sync():
            yield

    @contextmanager
    def _reduced(self, model: nn.Module, hook: CommHook) -> Iterator[None]:
        """Check after the last backward pass of a step that every bucket was reduced.

        A parameter without a gradient blocks its bucket and all later buckets.

        Raises:
            UserError: the loss did not use all parameters. Only this rank raises the error, while the others
                wait.
        """
        timeline, before = hook.timeline, hook.timeline.num_passes
        with hook.original_errors():
            yield
        if self.uses == "all" and not (timeline.is_complete and timeline.num_passes > before):
            unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
            raise UserError(
                f"strategy=ddp: the loss of rank {self.replica} did not use {unused_parameters(unused)}"
            )

    def replica_groups(self) -> list[tuple[int, ...]]:
        return [tuple(range(self.num_replicas))] if self.num_replicas > 1 else []

    def close(self) -> None:
        if self.hook is not None:
            self.hook.close()


def device_ids(devices: Sequence[torch.device]) -> list[torch.device] | None:
    """Return DDP's `device_ids`: the GPU of the model; None on CPUs or for a model on several devices."""
    return list(devices) if len(devices) == 1 and is_accelerator(devices[0]) else None


def _trainable(model: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in model.parameters() if parameter.requires_grad}
