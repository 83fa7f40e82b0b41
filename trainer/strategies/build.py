"""Build the strategy that the settings select."""

from trainer.config import Config, DdpConfig, FsdpConfig, ParameterServerConfig, check_one_process
from trainer.distributed.agreement import compare_across_ranks
from trainer.distributed.backend_flags import set_backend_flags
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError
from trainer.exact.environment import environment, prepare
from trainer.exact.order import ByChunks
from trainer.exact.sum_checks import NO_CHECKS, LinearChecks
from trainer.strategies.base import ComputeOptions, Strategy

_SAME_ENVIRONMENT = (
    "train.exact needs the same environment on every rank: the machine type, and torch's build and flags. "
    "Start all ranks in the same environment, or set train.exact=null"
)


def build_strategy(config: Config, ranks: Ranks) -> Strategy:
    """Set torch's flags from `config.train`, and return the strategy that `config.strategy` chooses.

    Raises:
        UserError: the strategy can't use this many processes, or this machine does not support an option.
            With train.exact: there are fewer chunks than ranks, or ranks differ in their environment.
    """
    set_backend_flags(config.train, ranks.device)
    strategy = _named(config, ranks)
    if config.train.exact is not None:
        _check_chunks(config.train.exact, config.strategy.name, strategy.num_replicas)
        prepare(ranks.device)
        compare_across_ranks(environment(ranks.device), ranks, _SAME_ENVIRONMENT)
        if config.train.precision == "bf16":
            strategy.notes.append("train.exact: in bf16, single and ddp give equal bits, but fsdp differs")
        verifies = config.train.verify_every is not None
        checks = LinearChecks(ranks.rank, ranks.world_size) if verifies else NO_CHECKS
        strategy.order = ByChunks(config.train.exact, ranks.describe(ranks.rank), checks)
    return strategy


def _check_chunks(num_chunks: int, strategy: str, num_replicas: int) -> None:
    above = -(-num_chunks // num_replicas) * num_replicas
    if num_chunks < num_replicas:
        raise UserError(
            f"train.exact={num_chunks} has fewer chunks than the {num_replicas} ranks; set "
            f"train.exact={above}, or start at most {num_chunks} ranks"
        )
    if strategy == "fsdp" and num_chunks % num_replicas:
        raise UserError(
            f"train.exact={num_chunks} is not divisible by the {num_replicas} ranks, but strategy=fsdp needs "
            f"the same number of chunks on each rank; set train.exact={above}, or use strategy=ddp"
        )


def _named(config: Config, ranks: Ranks) -> Strategy:
    settings, train, timeout_s = config.strategy, config.train, config.distributed.timeout_s
    compute = ComputeOptions(train.precision, train.compile, train.compile_mode, train.channels_last)
    match settings:
        case DdpConfig():
            from trainer.strategies.ddp import Ddp

            return Ddp(settings, config.comm, ranks, compute, timeout_s)
        case FsdpConfig():
            from trainer.strategies.fsdp import Fsdp

            return Fsdp(settings, ranks, compute)
        case ParameterServerConfig():
            from trainer.strategies.parameter_server import ParameterServer

            return ParameterServer(settings, ranks, compute, timeout_s)
    check_one_process(settings.name, ranks.world_size)
    if settings.name == "dp":
        from trainer.strategies.data_parallel import DataParallel

        return DataParallel(ranks.device, compute)
    return Strategy(ranks.device, compute)
