"""Claims: what the variables of each launcher say about a process.

====================  ==============================================================================================
torchrun              RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE; also ``shardwright run``, and set by hand
Open MPI              OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
PMI                   PMI_RANK, PMI_SIZE; of the host MPI_LOCALRANKID, MPI_LOCALNRANKS (Hydra: MPICH, Intel MPI), else
                      PMI_LOCAL_RANK, PMI_LOCAL_SIZE
Slurm                 SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID,
                      SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE, SLURM_STEP_NODELIST or SLURM_NODELIST or
                      SLURM_JOB_NODELIST
====================  ==============================================================================================

One process says nothing: under ``srun -n 1`` or ``mpirun -n 1`` a program is on its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.errors import SettingError
from shardwright.launch.host_list import expand

__all__ = ["Claim", "LOOPBACK", "number", "scheduled", "torchrun"]

LOOPBACK = "127.0.0.1"

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Claim:
    """What one launcher says of this process; None where it says nothing.

    Args:
        launcher: its name, for people.
        rank: of this process.
        size: how many processes there are.
        names: the variables of rank and size.
        local_rank: among the processes of this host.
        local_size: how many processes this host has.
        master: an address of rank 0's host.
        job: a text that the processes of one run share, and no other run on these hosts has.
    """

    launcher: str
    rank: int | None
    size: int | None
    names: tuple[str, str]
    local_rank: int | None = None
    local_size: int | None = None
    master: str | None = None
    job: str | None = None

    def __post_init__(self) -> None:
        for rank, size, (rank_name, size_name) in ((self.rank, self.size, self.names),
                                                   (self.local_rank, self.local_size, ("local rank", "local size"))):
            if rank is not None and size is not None and rank >= size:
                raise SettingError(f"{self.launcher}: {rank_name}={rank} is outside {size_name}={size}",
                                   legal=f"0 to {size - 1}" if size else "at least one process")

    @property
    def whole(self) -> bool:
        """Does it say both which rank this is and of how many?"""
        return self.rank is not None and self.size is not None


def number(environ: Environment, name: str) -> int | None:
    """The value of a variable that holds a number from 0; None where it is not set.

    Raises:
        SettingError: it holds something else.
    """
    text = environ.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise SettingError(f"{name}={text}", legal="a whole number from 0")
    return int(text)


def torchrun(environ: Environment) -> Claim | None:
    """The variables that torch itself reads. Either of rank and size alone is a claim that is not whole."""
    rank, size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    if rank is None and size in (None, 1):
        return None
    return Claim("torchrun", rank, size, ("RANK", "WORLD_SIZE"), number(environ, "LOCAL_RANK"),
                 number(environ, "LOCAL_WORLD_SIZE"))


def scheduled(environ: Environment) -> Claim | None:
    """What an MPI launcher says, else Slurm.

    MPI comes first: mpirun in an allocation of Slurm starts its daemons as Slurm's tasks, one a host, and the processes
    inherit those tasks' variables. Where ``srun`` itself speaks PMI the two say the same, and Slurm says more.
    """
    mpi = _open_mpi(environ) or _pmi(environ)
    slurm = _slurm(environ)
    if mpi is None or slurm is not None and mpi.launcher == "PMI" and (mpi.rank, mpi.size) == (slurm.rank, slurm.size):
        return slurm
    return mpi


def _pair(environ: Environment, launcher: str, names: tuple[str, str]) -> tuple[int, int] | None:
    """Rank and size; None where neither is set, or there is one process only."""
    rank, size = (number(environ, name) for name in names)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        there, lacks = names if size is None else names[::-1]
        raise SettingError(f"{launcher}: {there}={environ[there]} is set, {lacks} is not",
                           legal=f"both, as {launcher} sets them, or neither")
    return None if size == 1 and rank == 0 else (rank, size)


def _open_mpi(environ: Environment) -> Claim | None:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    pair = _pair(environ, "Open MPI", names)
    if pair is None:
        return None
    local = number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return Claim("Open MPI", *pair, names, number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"), local,
                 LOOPBACK if local == pair[1] else None,
                 environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid"))


def _pmi(environ: Environment) -> Claim | None:
    names = ("PMI_RANK", "PMI_SIZE")
    pair = _pair(environ, "PMI", names)
    if pair is None:
        return None
    rank, local = number(environ, "MPI_LOCALRANKID"), number(environ, "MPI_LOCALNRANKS")
    if rank is None:
        rank, local = number(environ, "PMI_LOCAL_RANK"), number(environ, "PMI_LOCAL_SIZE")
    return Claim("PMI", *pair, names, rank, local, LOOPBACK if local == pair[1] else None)


def _slurm(environ: Environment) -> Claim | None:
    # Of the step where it is told: an allocation may have more tasks and hosts than the step that runs this.
    size_name = _first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size_name is None or "SLURM_PROCID" not in environ:
        return None
    if environ.get("ENVIRONMENT") == "BATCH" and not {"SLURM_STEP_ID", "SLURM_STEPID"} & environ.keys():
        return None  # the batch script itself, which Slurm calls rank 0 of a step that is still to come
    names = ("SLURM_PROCID", size_name)
    pair = _pair(environ, "Slurm", names)
    if pair is None:
        return None
    listed = _first_set(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    hosts = expand(environ[listed], listed) if listed else ()
    local = _tasks_here(environ, len(hosts), pair[1])
    alone = len(hosts) == 1 or local == pair[1]
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    return Claim("Slurm", *pair, names, number(environ, "SLURM_LOCALID"), local,
                 LOOPBACK if alone else hosts[0] if hosts else None,
                 f"{job}.{environ.get('SLURM_STEP_ID', '')}" if job else None)


def _tasks_here(environ: Environment, hosts: int, size: int) -> int | None:
    """How many tasks this host has: of ``2(x3),1``, two on each of three hosts and one on the fourth, this host's."""
    name = _first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    node = number(environ, "SLURM_NODEID")
    if name and node is not None:
        tasks: list[int] = []
        for part in environ[name].split(","):
            found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
            if found is None:
                raise SettingError(f"{name}={environ[name]} cannot be read at {part!r}", legal="such as 2(x3),1")
            tasks += [int(found[1])] * int(found[2] or 1)
        if node < len(tasks) and sum(tasks) == size:
            return tasks[node]
    return size // hosts if hosts and size % hosts == 0 else None


def _first_set(environ: Environment, *names: str) -> str | None:
    return next((name for name in names if environ.get(name)), None)
