"""Find the rank and the rendezvous address of this process, for any launcher.

torchrun, srun and mpirun set different environment variables; a process started by hand uses
`distributed.rank`, `distributed.world_size` and `distributed.init_method`. Sources that contradict each other
raise an error. Otherwise, N processes might silently train N times, each as a single process.
"""

import contextlib
import os
import re
import signal
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from trainer.config import DistributedConfig
from trainer.errors import UserError

# Below Linux's range for outgoing connections (32768 and up), which could otherwise occupy the port.
_FIRST_PORT, _NUM_PORTS = 20000, 12000
ENV = "env://"
# Variables that launchers set; they do not apply to child processes.
RANK_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|OMPI_.*"
    r"|PMIX?_.*|MPI_LOCAL.*|SLURM_(PROCID|LOCALID|NODEID|NTASKS|STEP_.*)|PET_.*|RINGMASTER_(STORE_FD|LAUNCHER|END_FILE))$"
)
STORE_FD = "RINGMASTER_STORE_FD"  # a listening socket that rank 0 inherits, for the store at MASTER_PORT
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # set by torchrun only


@dataclass(frozen=True)
class RankInfo:
    """The position of a process in a run. None means unknown until the rendezvous."""

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    host: int | None  # index of the host
    launcher: str | None  # None: started by hand, or a single process
    init_method: str | None  # rendezvous URL for torch; None: a single process

    @property
    def under_torchrun(self) -> bool:
        return self.launcher == "torchrun"

    @property
    def among_ranks(self) -> bool:
        """Whether other processes were, or may have been, started with the same command line."""
        return self.world_size > 1 or self.under_torchrun


@dataclass(frozen=True)
class _LauncherVariables:
    """The names of the variables that a launcher sets; "" for a variable that it does not set."""

    launcher: str | None
    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""
    host: str = ""


_SETTINGS = _LauncherVariables(None, "distributed.rank", "distributed.world_size")
_ENVIRONMENT = _LauncherVariables(None, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_SRUN = _LauncherVariables(
    "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", host="SLURM_NODEID"
)
_OPEN_MPI = _LauncherVariables(
    "mpirun",
    *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
)
_PMI = _LauncherVariables("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def rank_info(settings: DistributedConfig | None = None) -> RankInfo:
    """Return the rank of this process, from `settings` and the environment.

    Raises:
        UserError: variables contradict each other, are incomplete or not numbers, or don't give the
            rendezvous address.
    """
    variables = dict(os.environ)
    if _is_interactive_shell(variables.get("SLURM_TASK_PID", "")):
        variables.pop(_SRUN.rank, None)  # the rank of the shell, not of the programs that it starts
    init_method = ENV
    if settings is not None:
        init_method = settings.init_method
        variables |= {
            f"distributed.{name}": str(value)
            for name in ("rank", "world_size")
            if (value := getattr(settings, name)) is not None
        }
    source = _source(variables)
    if source is None:
        _check_single_process(variables)
        if init_method != ENV:
            raise UserError(
                f"distributed.init_method={init_method} is set, but the rank of this process is not; add "
                "distributed.rank=0 distributed.world_size=2, and so on for each process"
            )
        return RankInfo(0, 1, 0, 1, 0, None, None)
    rank, world_size = _number(variables, source.rank), _number(variables, source.world_size)
    if rank >= world_size:
        raise UserError(
            f"{_shown(variables, source.rank)}, but {_shown(variables, source.world_size)}: "
            f"the rank must be from 0 to {world_size - 1}"
        )
    local_rank, local_world_size, host = (
        _number(variables, name) if name in variables else None
        for name in (source.local_rank, source.local_world_size, source.host)
    )
    if source is _ENVIRONMENT and local_world_size is not None and host is None:
        host = rank // local_world_size
    launcher = "torchrun" if source is _ENVIRONMENT and _AGENT in variables else source.launcher
    if world_size == 1 and launcher != "torchrun":
        return RankInfo(0, 1, 0, 1, 0, launcher, None)
    if init_method == ENV and launcher != "torchrun":
        init_method = _rendezvous_address(variables, source, local_world_size == world_size)
    return RankInfo(rank, world_size, local_rank, local_world_size, host, launcher, init_method)


def rank_from_environment() -> int:
    """Return the rank from the environment, for messages, even if `rank_info` would raise an error."""
    for source in (_ENVIRONMENT, _OPEN_MPI, _PMI, _SRUN):
        if (rank := os.environ.get(source.rank, "")).isdigit():
            return int(rank)
    return 0


def publish(here: RankInfo) -> None:
    """Set the variables that torchrun would set, for other libraries.

    Call it only in a process that makes a single run, because a later run would read these variables.
    """
    if here.world_size > 1:
        names = ("rank", "world_size", "local_rank", "local_world_size", "host")
        variables = {getattr(_ENVIRONMENT, name): getattr(here, name) for name in names}
        url = urlsplit(here.init_method or "")
        variables |= {"MASTER_ADDR": url.hostname, "MASTER_PORT": url.port} if url.scheme == "tcp" else {}
        os.environ.update({name: str(value) for name, value in variables.items() if value is not None})


def _is_interactive_shell(pid: str) -> bool:
    """Return whether process `pid` is a shell with job control, such as that of `srun --pty bash`.

    Such shells ignore SIGTTOU; other programs don't. An srun within the shell inherits its environment
    variables, so these can't show the difference.
    """
    with contextlib.suppress(OSError):
        ignored = re.search(r"^SigIgn:\s*(\w+)", Path("/proc", pid, "status").read_text(), re.MULTILINE)
        return ignored is not None and bool(int(ignored[1], 16) >> (signal.SIGTTOU - 1) & 1)
    return False


def _source(variables: Mapping[str, str]) -> _LauncherVariables | None:
    found = [source for source in (_ENVIRONMENT, _OPEN_MPI, _PMI, _SRUN) if _is_set(source, variables)]
    # A launcher of a single task may be nested: in a shell within srun, or with one srun per rank.
    if (found and found[0] is not _ENVIRONMENT) or len(found) > 1:
        has_settings = {_SETTINGS.rank, _SETTINGS.world_size} <= variables.keys()
        several = [
            source for source in found if source is _ENVIRONMENT or _number(variables, source.world_size) > 1
        ]
        found = several or ([] if has_settings else found[:1])
    if not found:
        return _SETTINGS if _complete(_SETTINGS, variables) else None
    best, *others = found
    if _AGENT in variables and others:
        _check_nested_torchrun(variables, others[0])
    elif best is _ENVIRONMENT:
        for other in others:
            _compare(variables, best, other)
    _compare(variables, _SETTINGS, best)
    return best


def _is_set(source: _LauncherVariables, variables: Mapping[str, str]) -> bool:
    if source is _SRUN:
        return {source.rank, source.world_size} <= variables.keys()
    if source is _PMI and _SRUN.world_size in variables and _PMI.local_rank not in variables:
        return False  # srun --mpi=pmi2 sets both; MPICH's own launcher also sets the local rank
    return _complete(source, variables)


def _complete(source: _LauncherVariables, variables: Mapping[str, str]) -> bool:
    missing = [name for name in (source.rank, source.world_size) if name not in variables]
    if len(missing) == 1:
        given = source.rank if missing[0] == source.world_size else source.world_size
        raise UserError(f"{_shown(variables, given)}, but {missing[0]} is not set; set both or neither")
    return not missing


def _compare(variables: Mapping[str, str], one: _LauncherVariables, other: _LauncherVariables) -> None:
    for first, second in ((one.rank, other.rank), (one.world_size, other.world_size)):
        if first in variables and _number(variables, first) != _number(variables, second):
            raise UserError(
                f"{_shown(variables, first)} contradicts {_shown(variables, second)}; remove {first}, or "
                f"start this process without {other.launcher or 'setting ' + second}"
            )


def _check_nested_torchrun(variables: Mapping[str, str], outer: _LauncherVariables) -> None:
    """Raise UserError if each task of another launcher runs its own torchrun, with separate ranks."""
    # An elastic torchrun may start with fewer hosts than the outer launcher has tasks.
    if variables.get("GROUP_WORLD_SIZE") == "1" and variables.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        raise UserError(
            f"{_shown(variables, outer.world_size)}, but torchrun's GROUP_WORLD_SIZE=1: each task of "
            f"{outer.launcher} would start a run of its own; pass --nnodes and --rdzv-endpoint to torchrun, "
            "or start the run without torchrun"
        )


def _check_single_process(variables: Mapping[str, str]) -> None:
    """Raise UserError if this process has no rank although it is one of several tasks."""
    if "SLURM_PROCID" in variables and "SLURM_NTASKS" in variables and _number(variables, "SLURM_NTASKS") > 1:
        count, way_out = "SLURM_NTASKS", "srun; use `srun python train.py ...`, or --ntasks=1"
    elif variables.get("PET_NNODES", "1") != "1":
        count, way_out = "PET_NNODES", "torchrun, which reads the PET_* variables; start it with torchrun"
    else:
        return
    raise UserError(
        f"{_shown(variables, count)}, but this process would train on its own, because it was not started by "
        f"{way_out}"
    )


def _rendezvous_address(variables: Mapping[str, str], source: _LauncherVariables, alone_on_host: bool) -> str:
    """Return tcp://HOST:PORT of rank 0: MASTER_ADDR and MASTER_PORT, or else derived from the launcher."""
    address, port = variables.get("MASTER_ADDR", "").strip("[]"), variables.get("MASTER_PORT")
    job = variables.get("PMIX_NAMESPACE")
    if source is not _SRUN and alone_on_host:
        address = address or "127.0.0.1"
        # Without a job name, use the parent, which all processes of an mpirun on a host share.
        job = job or (str(os.getppid()) if source in (_OPEN_MPI, _PMI) else None)
    elif "SLURM_JOB_NODELIST" in variables:
        address = address or first_node(variables.get("SLURM_STEP_NODELIST", variables["SLURM_JOB_NODELIST"]))
        job = f"{variables['SLURM_JOB_ID']}.{variables.get('SLURM_STEP_ID')}" if source is _SRUN else job
    if not address:
        hint = " (mpirun -x MASTER_ADDR=HOST passes it to all ranks)" if source is _OPEN_MPI else ""
        raise UserError(
            f"{_shown(variables, source.world_size)}, but the address of rank 0 is unknown; set MASTER_ADDR "
            f"to the name of its host{hint}, or set distributed.init_method=tcp://HOST:PORT"
        )
    if port is None and job is None:
        raise UserError(
            f"MASTER_ADDR={address} is set, but MASTER_PORT is not; set MASTER_PORT to a free port on that "
            "host"
        )
    number = _number(variables, "MASTER_PORT") if port is not None else derived_port(str(job))
    return f"tcp://{f'[{address}]' if ':' in address else address}:{number}"


def derived_port(job: str) -> int:
    """Return a port that all ranks of a job can compute, and that rarely equals another job's port."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def first_node(nodes: str) -> str:
    """Return the first node of a SLURM node list: `rack1node08-ib` for `rack[1,3-4]node[08-10]-ib,login`."""
    first = re.split(r",(?![^\[]*\])", nodes, maxsplit=1)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _number(variables: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"\d+", variables[name]):
        raise UserError(f"{_shown(variables, name)}: expected an integer of at least 0")
    return int(variables[name])


def _shown(variables: Mapping[str, str], name: str) -> str:
    return f"{name}={variables[name]}"
