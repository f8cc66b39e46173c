"""The environment: the place of this process in its run, from the variables that its launcher has set.

The launcher that started the process last has precedence. The order:

1. torchrun and ``shardwright run`` (``TORCHELASTIC_RUN_ID`` is set). An outer launcher of these, such as ``srun`` or
   mpirun with one process a host, has other ranks, which are ignored.
2. ``RANK`` and ``WORLD_SIZE`` set by hand, a rank table (``RANK_TABLE_FILE``, ``RANK_ID``, ``DEVICE_ID``), Open MPI,
   another MPI over PMI, Slurm, msrun. Where several are set they have to agree: a leftover cannot be told from a valid
   one.
3. None: all devices are in this process. Variables of a launcher that is not read here are an error where they make
   this process one of several (`unread`), and a warning where they may do so (`remark`): eight processes that each play
   all devices would train eight times, into one folder. ``SHARDWRIGHT_DEVICES`` (``shardwright run --devices=8``) says
   that this process is alone, whatever else is set.

Rank 0 listens at ``MASTER_ADDR:MASTER_PORT``. Where they are not set, the address is that of the rank table's first
server or of Slurm's first host, and 127.0.0.1 where the run has one host only. The port is 29500; under Open MPI and
Slurm it is one from 20000 to 32767, computed from the job's id, so that runs on one host do not meet each other.

Claims (`Claim`): the variables of each launcher.

    ============  ====================================================================================================
    torchrun      RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE; also ``shardwright run``, and set by hand
    Open MPI      OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    PMI           PMI_RANK, PMI_SIZE; on the host MPI_LOCALRANKID, MPI_LOCALNRANKS (Hydra: MPICH, Intel MPI), else
                  PMI_LOCAL_RANK, PMI_LOCAL_SIZE
    Slurm         SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID,
                  SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE, SLURM_STEP_NODELIST or SLURM_NODELIST or
                  SLURM_JOB_NODELIST
    msrun         MS_ROLE, MS_WORKER_NUM, MS_NODE_ID, MS_SCHED_HOST, MS_SCHED_PORT; also set by hand, as for MindSpore's
                  dynamic cluster. MS_ROLE is MS_WORKER, or MS_SCHED for one more process, which has no rank
                  (`is_msrun_scheduler`)
    ============  ====================================================================================================

One process is no claim: under ``srun -n 1`` or ``mpirun -n 1`` a program is on its own.

Slurm's host lists (`expand`): ``node[01-03,07],gpu[1-2]-[0-1],login`` is written out without asking Slurm.

    list    = item ("," item)*                  commas inside brackets do not separate items
    item    = (text | "[" ranges "]")*          the product of its brackets, the last one fastest
    ranges  = (n | n "-" m) ("," ...)*          as wide as the low end is written: 01-03 has zeros, 1-3 has none

Example: ``n[01-02]-[0-1]`` is n01-0, n01-1, n02-0, n02-1.

Network interface (`leading_to`): Gloo listens at the address of the host's own name, which on many machines is a
loopback address that ranks of other hosts cannot reach, and on others an address that other hosts reach though the
run is on one host. The interface that leads to rank 0's host also leads to the other hosts of the run.

Token (`token_of`): a secret of the run. Nodes and ranks that do not know it are not taken (`rendezvous.admitted`).

Rank tables are read by `rank_table.RankTable`.
"""

from __future__ import annotations

import ipaddress
import itertools
import math
import re
import socket
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import SettingError
from .rank_table import MOST, RankTable, cut, whole_number

__all__ = [
    "LOOPBACK",
    "TOKEN",
    "Claim",
    "RankInRun",
    "expand",
    "find",
    "is_loopback",
    "is_msrun_scheduler",
    "leading_to",
    "number",
    "remark",
    "scheduled",
    "token_of",
    "torchrun",
    "unread",
]


# -- the run's token ---------------------------------------------------------------------------------------------------

TOKEN = "SHARDWRIGHT_RUN_TOKEN"

_SHORTEST = 16  # characters of a token: 64 bits where they are hexadecimal digits


def token_of(environ: Mapping[str, str]) -> str:
    """The run's token; "" where there is none.

    Raises:
        SettingError: a token that could be guessed.
    """
    token = environ.get(TOKEN, "")
    if token and len(token) < _SHORTEST:
        raise SettingError(
            f"{TOKEN} has {len(token)} characters",
            legal=f"{_SHORTEST} random ones or more, the same for all processes: {TOKEN}=$(openssl rand -hex 16)",
        )
    return token


# -- Slurm's host lists ------------------------------------------------------------------------------------------------

_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")

#: Hosts of a list, at most.
MOST_HOSTS = 1 << 20


def expand(text: str, name: str) -> tuple[str, ...]:
    """The hosts of a host list, in its order.

    Args:
        text: the list.
        name: the variable that holds it, for errors.

    Raises:
        SettingError: the list cannot be read, or names more than `MOST_HOSTS` hosts.
    """
    hosts: list[str] = []
    at = 0
    while True:
        item = _ITEM.match(text, at)
        if item is None:
            break
        pieces: list[Sequence[str]] = [
            _ranges(piece[1], text, name) if piece[1] is not None else [piece[2]] for piece in _PIECE.finditer(item[0])
        ]
        if len(hosts) + math.prod(map(len, pieces)) > MOST_HOSTS:
            raise SettingError(
                f"{name}={cut(text)} names more than {MOST_HOSTS:,} hosts, at {cut(item[0])}",
                legal=f"a list of at most {MOST_HOSTS:,} hosts, such as node[01-03,07],login1",
            )
        hosts += map("".join, itertools.product(*pieces))
        at = item.end()
        if not text.startswith(",", at):
            break
        at += 1
    if at != len(text) or not hosts or text.endswith(","):
        raise SettingError(
            f"{name}={cut(text)} cannot be read from its character {at + 1} on",
            legal="a list of hosts such as node[01-03,07],login1",
        )
    return tuple(hosts)


def _ranges(inside: str, text: str, name: str) -> Sequence[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        found = _RANGE.fullmatch(part)
        low, high = (found[1], found[2] or found[1]) if found is not None else ("1", "0")
        if int(high) < int(low):
            raise SettingError(
                f"{name}={cut(text)}: [{cut(inside)}] cannot be read at {cut(part)!r}",
                legal="numbers of at most 9 digits and ranges from low to high, such as [01-03,07]",
            )
        if len(numbers) + int(high) - int(low) >= MOST_HOSTS:
            raise SettingError(
                f"{name}={cut(text)} names more than {MOST_HOSTS:,} hosts, at {cut(part)!r}",
                legal=f"a list of at most {MOST_HOSTS:,} hosts, such as node[01-03,07],login1",
            )
        numbers += (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))
    return numbers


# -- claims of launchers -----------------------------------------------------------------------------------------------

LOOPBACK = "127.0.0.1"

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Claim:
    """The variables of one launcher for this process; a field is None where its variable is not set.

    Args:
        launcher: its name, for messages.
        rank: the rank of this process.
        size: the number of processes.
        names: the variables of rank and size.
        local_rank: the rank among the processes of this host.
        local_size: the number of processes on this host.
        master: an address of rank 0's host.
        job: a text that the processes of one run share, and that no other run on these hosts has.
        port: the port at which rank 0 listens, where the launcher has one.
    """

    launcher: str
    rank: int | None
    size: int | None
    names: tuple[str, str]
    local_rank: int | None = None
    local_size: int | None = None
    master: str | None = None
    job: str | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        for rank, size, (rank_name, size_name) in (
            (self.rank, self.size, self.names),
            (self.local_rank, self.local_size, ("local rank", "local size")),
        ):
            if rank is not None and size is not None and rank >= size:
                raise SettingError(
                    f"{self.launcher}: {rank_name}={rank} is outside {size_name}={size}",
                    legal=f"0 to {size - 1}" if size else "at least one process",
                )

    @property
    def whole(self) -> bool:
        """True where both rank and size are known."""
        return self.rank is not None and self.size is not None


def number(environ: Environment, name: str) -> int | None:
    """The value of a variable that holds a number from 0; None where it is not set.

    Raises:
        SettingError: it holds something else.
    """
    text = environ.get(name, "")
    if not text:
        return None
    value = whole_number(text)
    if value is None:
        raise SettingError(f"{name}={cut(text)}", legal=f"a whole number from 0 to {MOST:,}")
    return value


def torchrun(environ: Environment) -> Claim | None:
    """The claim of the variables that torch itself reads; rank or size alone makes a claim that is not whole."""
    rank, size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    if rank is None and size in (None, 1):
        return None
    return Claim(
        "torchrun",
        rank,
        size,
        ("RANK", "WORLD_SIZE"),
        number(environ, "LOCAL_RANK"),
        number(environ, "LOCAL_WORLD_SIZE"),
    )


def scheduled(environ: Environment) -> Claim | None:
    """The claim of an MPI launcher, or else of Slurm.

    MPI comes first: mpirun in an allocation of Slurm starts its daemons as Slurm's tasks, one a host, and the
    processes inherit those tasks' variables. Where ``srun`` itself provides PMI, both claims agree, and Slurm's has
    more fields.
    """
    mpi = _open_mpi(environ) or _pmi(environ)
    slurm = _slurm(environ)
    if mpi is None or (
        slurm is not None and mpi.launcher == "PMI" and (mpi.rank, mpi.size) == (slurm.rank, slurm.size)
    ):
        return slurm
    return mpi


def _pair(environ: Environment, launcher: str, names: tuple[str, str]) -> tuple[int, int] | None:
    """Rank and size; None where neither is set, or where there is one process only."""
    rank, size = (number(environ, name) for name in names)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        present, lacks = names if size is None else names[::-1]
        raise SettingError(
            f"{launcher}: {present}={environ[present]} is set, {lacks} is not",
            legal=f"both, as {launcher} sets them, or neither",
        )
    return None if size == 1 and rank == 0 else (rank, size)


def _open_mpi(environ: Environment) -> Claim | None:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    pair = _pair(environ, "Open MPI", names)
    if pair is None:
        return None
    local = number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return Claim(
        "Open MPI",
        *pair,
        names,
        number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local,
        LOOPBACK if local == pair[1] else None,
        environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid"),
    )


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
    # The step's variables come first: an allocation may have more tasks and hosts than the step that runs this process.
    size_name = _first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size_name is None or "SLURM_PROCID" not in environ:
        return None
    if environ.get("ENVIRONMENT") == "BATCH" and not {"SLURM_STEP_ID", "SLURM_STEPID"} & environ.keys():
        return None  # the batch script itself: Slurm gives it rank 0 of a step that is still to come
    names = ("SLURM_PROCID", size_name)
    pair = _pair(environ, "Slurm", names)
    if pair is None:
        return None
    listed = _first_set(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    hosts = expand(environ[listed], listed) if listed else ()
    local = _tasks_on_host(environ, len(hosts), pair[1])
    alone = len(hosts) == 1 or local == pair[1]
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    return Claim(
        "Slurm",
        *pair,
        names,
        number(environ, "SLURM_LOCALID"),
        local,
        LOOPBACK if alone else hosts[0] if hosts else None,
        f"{job}.{environ.get('SLURM_STEP_ID', '')}" if job else None,
    )


def _tasks_on_host(environ: Environment, hosts: int, size: int) -> int | None:
    """The number of tasks on this host.

    ``2(x3),1`` means two on each of three hosts and one on the fourth.
    """
    name = _first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    node = number(environ, "SLURM_NODEID")
    if name and node is not None:
        tasks: list[int] = []
        for part in environ[name].split(","):
            found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,7})\))?", part)
            if found is None or len(tasks) + int(found[2] or 1) > MOST_HOSTS:
                raise SettingError(
                    f"{name}={cut(environ[name])} cannot be read at {cut(part)!r}",
                    legal=f"tasks of at most {MOST_HOSTS:,} hosts, such as 2(x3),1",
                )
            tasks += [int(found[1])] * int(found[2] or 1)
        if node < len(tasks) and sum(tasks) == size:
            return tasks[node]
    return size // hosts if hosts and size % hosts == 0 else None


_SCHEDULER, _WORKER = "MS_SCHED", "MS_WORKER"


def _msrun(environ: Environment) -> Claim | None:
    """The claim of msrun, or of the same variables set by hand; None where this process is none of its workers.

    Without ``--node_rank`` msrun leaves the ranks of several nodes to MindSpore's own scheduler, which does not run.
    """
    role, names = environ.get("MS_ROLE", ""), ("MS_NODE_ID", "MS_WORKER_NUM")
    if not role or role == _SCHEDULER:
        return None
    if role != _WORKER:
        raise SettingError(f"MS_ROLE={role}", legal=f"{_WORKER} or {_SCHEDULER}, as msrun sets it, or no MS_ROLE")
    rank, size = (number(environ, name) for name in names)
    if size == 1:
        return None
    if size is None or rank is None:
        raise SettingError(
            f"msrun: MS_ROLE={role} is set, {names[1] if size is None else names[0]} is not",
            legal="MS_WORKER_NUM, and MS_NODE_ID from 0: both are set by msrun, on several nodes with --node_rank; or "
            "no MS_ROLE",
        )
    host = environ.get("MS_SCHED_HOST") or LOOPBACK
    alone = is_loopback(host)
    local = rank if alone else number(environ, "DEVICE_ID")
    return Claim(
        "msrun", rank, size, names, local, size if alone else None, host, port=number(environ, "MS_SCHED_PORT")
    )


def is_msrun_scheduler(environ: Environment) -> bool:
    """True for the process that msrun starts beside the workers, as the meeting point of MindSpore's own processes.

    It runs the script like the workers, and has no rank. msrun waits for its end.
    """
    return (
        environ.get("MS_ROLE") == _SCHEDULER
        and bool(environ.get("MS_WORKER_NUM"))
        and "TORCHELASTIC_RUN_ID" not in environ
        and "SHARDWRIGHT_DEVICES" not in environ
    )


def is_loopback(host: str) -> bool:
    """True for a loopback address, and for the name localhost. Other names are not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# -- launchers that are not read ---------------------------------------------------------------------------------------

#: Launcher, its variable of the rank, its variable of the number of processes ("": none). Slurm and msrun are read
#: above; these rows are for workers that have lost the variable of the number.
_UNREAD = (
    ("PMIx", "PMIX_RANK", ""),
    ("HPE PALS", "PALS_RANKID", ""),
    ("Cray ALPS", "ALPS_APP_PE", ""),
    ("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("IBM jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("Horovod", "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("PaddlePaddle", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
    ("DMLC", "DMLC_WORKER_ID", "DMLC_NUM_WORKER"),
    ("JAX", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    ("Slurm", "SLURM_PROCID", ""),
    ("a launcher", "LOCAL_RANK", ""),
)

#: The number of processes, by launchers that are read.
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "MS_WORKER_NUM")

_HOW_TO_BE_ALONE = "`shardwright run --devices=8 train.py`, or SHARDWRIGHT_DEVICES=8, where it is to play all devices"


def _seen(environ: Environment) -> list[tuple[str, str, int, str, int | None]]:
    """Variables that give this process a rank: launcher, name and value of the rank, name and value of the number of
    processes. Pairs ``X_RANK`` and ``X_SIZE`` of unknown launchers come last, without a launcher's name."""
    known = [row for row in _UNREAD if _count(environ.get(row[1], "")) is not None]
    names = {rank for _, rank, _ in known} | {"RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_LOCAL_RANK"}
    rows = [
        *known,
        *(("", name, f"{name[:-4]}SIZE") for name in sorted(environ) if name.endswith("_RANK") and name not in names),
    ]
    found = []
    for launcher, rank_name, size_name in rows:
        rank, size = _count(environ.get(rank_name, "")), _count(environ.get(size_name, "") if size_name else "")
        if rank is not None and (launcher or size is not None):
            found.append((launcher, rank_name, rank, size_name, size))
    return found


def _count(text: str) -> int | None:
    """The number that a variable holds; None for another text, and for more than 9 digits."""
    return int(text) if text.isdecimal() and len(text) <= 9 else None


def unread(environ: Environment) -> SettingError | None:
    """The error where a launcher that is not read here has made this process one of several; None where none has."""
    for launcher, rank_name, rank, size_name, size in _seen(environ):
        if launcher and (size > 1 if size is not None else rank > 0):
            names = f"{rank_name}={rank}" + (f" of {size_name}={size}" if size is not None else "")
            return SettingError(
                f"{names} is set, as {launcher} sets it for one of several processes, and nothing that is read here "
                "says how many there are and where rank 0 is",
                legal="RANK, WORLD_SIZE and MASTER_ADDR set from the launcher's variables before sw.init(); no "
                f"{rank_name} where it is left over; {_HOW_TO_BE_ALONE}",
            )
    return None


def remark(environ: Environment) -> str | None:
    """A warning for a process that plays all devices, where variables may mean that it is one of several; None where
    there are none."""
    if "SHARDWRIGHT_DEVICES" in environ or any(environ.get(name) == "1" for name in _SIZES):
        return None
    variables = [
        f"{rank_name}={rank}" + (f" and {size_name}={size}" if size is not None else "")
        for launcher, rank_name, rank, size_name, size in _seen(environ)
        if rank_name not in ("LOCAL_RANK", "SLURM_PROCID")  # 0 in notebooks, and in Slurm's batch scripts
        and (size is None or rank < size > 1)
    ]
    workers = _count(environ.get("MS_WORKER_NUM", ""))
    if workers is not None and workers > 1 and not environ.get("MS_ROLE"):
        variables.append(f"MS_WORKER_NUM={workers} without MS_ROLE")
    if not variables:
        return None
    return (
        f"{', '.join(variables)}: the environment may mean that this process is one of several, but no launcher that "
        "Shardwright reads has set it, and this process plays all devices alone. If it is one of several, set RANK, "
        f"WORLD_SIZE and MASTER_ADDR; if not, unset the variable, or use {_HOW_TO_BE_ALONE}"
    )


def _first_set(environ: Environment, *names: str) -> str | None:
    return next((name for name in names if environ.get(name)), None)


# -- network interface -------------------------------------------------------------------------------------------------

SIOCGIFADDR = 0x8915  # Linux, netdevice(7): the IPv4 address of an interface


def leading_to(address: str, port: int) -> str | None:
    """The name of the interface through which this host reaches an address; None if it is unknown.

    The loopback interface is named for a loopback address, and for "localhost". Another name that stands for a
    loopback address here may stand for another address on other hosts: None.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # on a datagram socket: looks up the route, sends nothing
            outgoing = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except (OSError, ValueError):
        return None
    if outgoing.is_loopback and not is_loopback(address):
        return None
    return next((name for _, name in socket.if_nameindex() if outgoing in _addresses(name)), None)


def _addresses(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses of an interface: its first IPv4 address and all IPv6 ones; empty where the system is not Linux."""
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    try:
        import fcntl  # noqa: PLC0415  missing on Windows

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        found.append(ipaddress.IPv4Address(answer[20:24]))
    except (ImportError, OSError):
        pass
    try:
        with open("/proc/net/if_inet6") as file:
            found += (ipaddress.IPv6Address(int(line.split()[0], 16)) for line in file if line.split()[-1] == name)
    except OSError:
        pass
    return found


# -- the place in the run ----------------------------------------------------------------------------------------------

PORT = 29500  # torch's own default
JOB_PORTS = range(20000, 32768)  # below those that Linux hands out to connections


@dataclass(frozen=True)
class RankInRun:
    """The place of this process in its run.

    Args:
        launcher: the launcher that assigned it, for messages.
        rank: the rank of this process.
        size: the number of processes of the run, two at least.
        device: the index of its accelerator on its host.
        devices: the number of accelerators that the host must have for that.
        master_addr: the address at which rank 0 listens.
        master_port: the port there.
        agent: True where a launcher's agent listens there instead of rank 0.
        table: the rank table, if there is one.
    """

    launcher: str
    rank: int
    size: int
    device: int
    devices: int
    master_addr: str
    master_port: int
    agent: bool = False
    table: RankTable | None = None

    def whereabouts(self, rank: int) -> str:
        """``rank 9``, with its server and device where there is a rank table."""
        if self.table is None:
            return f"rank {rank}"
        entry = self.table.devices[rank]
        return f"rank {rank} (server {entry.server}, device {entry.device})"


def find(environ: Mapping[str, str]) -> RankInRun | None:
    """The place of this process in its run; None where it is on its own.

    Args:
        environ: the environment of the process.

    Raises:
        SettingError: variables cannot be read, lack their partner or contradict one another; a faulty rank table.
    """
    torch = torchrun(environ)
    agent = torch is not None and torch.whole and "TORCHELASTIC_RUN_ID" in environ
    scheduler = None if agent else scheduled(environ)
    path = environ.get("RANK_TABLE_FILE")
    table = RankTable.read(path) if path else None
    msrun = None if agent or "SHARDWRIGHT_DEVICES" in environ else _msrun(environ)
    claims = [claim for claim in (torch, _ascend(environ, table), scheduler, msrun) if claim is not None]
    whole = next((claim for claim in claims if claim.whole), None)
    if whole is None:
        if "SHARDWRIGHT_DEVICES" not in environ:  # --devices: all in this process, other variables are ignored
            error = _incomplete(claims[0], environ) if claims else unread(environ)
            if error is not None:
                raise error
        return None
    for claim in claims:
        _agree(whole, claim)
    if whole.size == 1:
        return None
    return _place(environ, whole, claims, agent, table)


def _ascend(environ: Mapping[str, str], table: RankTable | None) -> Claim | None:
    """The claim of RANK_ID and the rank table; either of them alone makes a claim that is not whole."""
    rank, size = number(environ, "RANK_ID"), number(environ, "RANK_SIZE")
    if table is None:
        return None if rank is None else Claim("rank table", rank, None, ("RANK_ID", "RANK_TABLE_FILE"))
    ranks = len(table.devices)
    if size is not None and size != ranks:
        raise SettingError(
            f"RANK_SIZE={size}, but the rank table has {ranks} devices",
            source=table.path,
            legal=f"RANK_SIZE={ranks}, or none",
        )
    if rank is None:
        return Claim("rank table", None, ranks, ("RANK_ID", "the rank table's devices"))
    if rank >= ranks:
        raise SettingError(f"RANK_ID={rank} is not in the rank table", source=table.path, legal=f"0 to {ranks - 1}")
    return Claim("rank table", rank, ranks, ("RANK_ID", "the rank table's devices"))


def _agree(one: Claim, other: Claim) -> None:
    for name, other_name, value, other_value in zip(
        one.names, other.names, (one.rank, one.size), (other.rank, other.size)
    ):
        if value is not None and other_value is not None and value != other_value:
            raise SettingError(
                f"{name}={value} ({one.launcher}) and {other_name}={other_value} ({other.launcher}) contradict one "
                "another",
                legal="what one launcher sets; unset what is left over of the other",
            )


def _incomplete(claim: Claim, environ: Mapping[str, str]) -> SettingError:
    if claim.launcher == "torchrun":
        present, lacks = ("RANK", "WORLD_SIZE") if claim.size is None else ("WORLD_SIZE", "RANK")
        return SettingError(
            f"{present}={environ[present]} is set, {lacks} is not",
            legal="both, as torchrun and shardwright run set them, or neither",
        )
    if claim.rank is None:
        assert claim.size is not None
        return SettingError(
            f"RANK_TABLE_FILE={environ['RANK_TABLE_FILE']} is set, RANK_ID is not",
            legal=f"RANK_ID from 0 to {claim.size - 1}, another launcher, or no RANK_TABLE_FILE",
        )
    return SettingError(
        f"RANK_ID={claim.rank} is set, RANK_TABLE_FILE is not", legal="the path of the rank table, or no RANK_ID"
    )


def _place(
    environ: Mapping[str, str], whole: Claim, claims: list[Claim], agent: bool, table: RankTable | None
) -> RankInRun:
    rank, size, known = whole.rank, whole.size, None
    assert rank is not None and size is not None
    if table is not None:
        beside = table.beside(rank)
        device, devices = table.devices[rank].device, 1 + max(entry.device for entry in beside)
        device_id = number(environ, "DEVICE_ID")
        if device_id is not None and device_id != device:
            raise SettingError(
                f"DEVICE_ID={device_id}, but rank {rank} is device {device} of server {table.devices[rank].server}",
                source=table.path,
                legal=f"DEVICE_ID={device}, or none",
            )
        known = LOOPBACK if len(table.servers) == 1 else table.servers[0]
    else:
        # A launcher that binds each process to an accelerator of its own sets LOCAL_RANK=0 for all: no contradiction.
        local = next((claim for claim in claims if claim.local_rank is not None), whole)
        device = local.local_rank or 0
        devices = local.local_size or device + 1
        known = next((claim.master for claim in claims if claim.master is not None), None)
    address = environ.get("MASTER_ADDR") or known
    if not address:
        raise SettingError(
            f"{whole.launcher}: {whole.names[0]}={rank} of {whole.names[1]}={size} is set, MASTER_ADDR "
            "is not, and nothing else says where rank 0 is",
            legal="MASTER_ADDR, the address of rank 0's host (mpirun -x MASTER_ADDR=10.0.0.1)",
        )
    port, port_name = number(environ, "MASTER_PORT"), "MASTER_PORT"
    job = next((claim.job for claim in claims if claim.job), None) if table is None else None
    if port is None:
        port, port_name = next((claim.port for claim in claims if claim.port is not None), None), "MS_SCHED_PORT"
    if port is not None and not 0 < port < 65536:
        raise SettingError(f"{port_name}={port}", legal="a port from 1 to 65535")
    if port is None:
        port = PORT if job is None else JOB_PORTS[zlib.crc32(job.encode()) % len(JOB_PORTS)]
    return RankInRun(whole.launcher, rank, size, device, devices, address, port, agent, table)
