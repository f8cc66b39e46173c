"""The environment: which process of which run this one is, told by whoever started it.

Whoever started the process last knows best. In this order:

1. torchrun and ``shardwright run`` (``TORCHELASTIC_RUN_ID`` is set). What started *them*, ``srun`` or mpirun one
   process a host, has other ranks, which are not looked at.
2. ``RANK`` and ``WORLD_SIZE`` set by hand, a rank table (``RANK_TABLE_FILE``, ``RANK_ID``, ``DEVICE_ID``), Open MPI,
   another MPI over PMI, Slurm. They have to agree where several speak, for nobody can say which is a leftover.
3. Nobody: all devices are in this process.

Rank 0 listens at ``MASTER_ADDR:MASTER_PORT``. Where they are not set the address is that of the rank table's first
server or of Slurm's first host, 127.0.0.1 where the run has one host only; the port is 29500, under Open MPI and Slurm
one from 20000 to 32767 that is made of the job's id, so that runs on one host do not meet each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.errors import SettingError
from shardwright.launch.claims import LOOPBACK, Claim, number, scheduled, torchrun
from shardwright.launch.rank_table import RankTable

__all__ = ["Place", "find"]

PORT = 29500  # torch's own default
JOB_PORTS = range(20000, 32768)  # below those that Linux hands out to connections


@dataclass(frozen=True)
class Place:
    """The place of this process in its run.

    Args:
        launcher: who says so, for people.
        rank: of this process.
        size: how many processes the run has, two at least.
        device: the index of its accelerator on its host.
        devices: how many accelerators the host must have for that.
        master_addr: where rank 0 listens.
        master_port: the port there.
        agent: a launcher's agent listens there, in place of rank 0.
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
        """``rank 9``, with its server where a rank table says it."""
        if self.table is None:
            return f"rank {rank}"
        entry = self.table.devices[rank]
        return f"rank {rank} (server {entry.server}, device {entry.device})"


def find(environ: Mapping[str, str]) -> Place | None:
    """The place of this process; None where it is on its own.

    Args:
        environ: the environment of the process.

    Raises:
        SettingError: variables that cannot be read, lack their partner or contradict one another, a faulty rank table.
    """
    torch = torchrun(environ)
    agent = torch is not None and torch.whole and "TORCHELASTIC_RUN_ID" in environ
    scheduler = None if agent else scheduled(environ)
    path = environ.get("RANK_TABLE_FILE")
    table = RankTable.read(path) if path else None
    claims = [claim for claim in (torch, _ascend(environ, table), scheduler) if claim is not None]
    whole = next((claim for claim in claims if claim.whole), None)
    if whole is None:
        if claims and "SHARDWRIGHT_DEVICES" not in environ:  # --devices: in this process, whatever else is set
            raise _incomplete(claims[0], environ)
        return None
    for claim in claims:
        _agree(whole, claim)
    if whole.size == 1:
        return None
    return _place(environ, whole, claims, agent, table)


def _ascend(environ: Mapping[str, str], table: RankTable | None) -> Claim | None:
    """What RANK_ID and the rank table say. RANK_ID alone, or a table alone, is a claim that is not whole."""
    rank, size = number(environ, "RANK_ID"), number(environ, "RANK_SIZE")
    if table is None:
        return None if rank is None else Claim("rank table", rank, None, ("RANK_ID", "RANK_TABLE_FILE"))
    ranks = len(table.devices)
    if size is not None and size != ranks:
        raise SettingError(f"RANK_SIZE={size}, but the rank table has {ranks} devices", source=table.path,
                           legal=f"RANK_SIZE={ranks}, or none")
    if rank is None:
        return Claim("rank table", None, ranks, ("RANK_ID", "the rank table's devices"))
    if rank >= ranks:
        raise SettingError(f"RANK_ID={rank} is not in the rank table", source=table.path, legal=f"0 to {ranks - 1}")
    return Claim("rank table", rank, ranks, ("RANK_ID", "the rank table's devices"))


def _agree(one: Claim, other: Claim) -> None:
    for name, other_name, value, other_value in zip(one.names, other.names, (one.rank, one.size),
                                                    (other.rank, other.size)):
        if value is not None and other_value is not None and value != other_value:
            raise SettingError(
                f"{name}={value} ({one.launcher}) and {other_name}={other_value} ({other.launcher}) contradict one "
                "another", legal="what one launcher sets; unset what is left over of the other")


def _incomplete(claim: Claim, environ: Mapping[str, str]) -> SettingError:
    if claim.launcher == "torchrun":
        there, lacks = ("RANK", "WORLD_SIZE") if claim.size is None else ("WORLD_SIZE", "RANK")
        return SettingError(f"{there}={environ[there]} is set, {lacks} is not",
                            legal="both, as torchrun and shardwright run set them, or neither")
    if claim.rank is None:
        return SettingError(f"RANK_TABLE_FILE={environ['RANK_TABLE_FILE']} is set, RANK_ID is not",
                            legal=f"RANK_ID from 0 to {claim.size - 1}, another launcher, or no RANK_TABLE_FILE")
    return SettingError(f"RANK_ID={claim.rank} is set, RANK_TABLE_FILE is not",
                        legal="the path of the rank table, or no RANK_ID")


def _place(environ: Mapping[str, str], whole: Claim, claims: list[Claim], agent: bool,
           table: RankTable | None) -> Place:
    rank, size = whole.rank, whole.size
    if table is not None:
        beside = table.beside(rank)
        device, devices = table.devices[rank].device, 1 + max(entry.device for entry in beside)
        said = number(environ, "DEVICE_ID")
        if said is not None and said != device:
            raise SettingError(f"DEVICE_ID={said}, but rank {rank} is device {device} of server "
                               f"{table.devices[rank].server}", source=table.path,
                               legal=f"DEVICE_ID={device}, or none")
        known = LOOPBACK if len(table.servers) == 1 else table.servers[0]
    else:
        # One who binds each process to an accelerator of its own says LOCAL_RANK=0 to all: not a contradiction.
        local = next((claim for claim in claims if claim.local_rank is not None), whole)
        device = local.local_rank or 0
        devices = local.local_size or device + 1
        known = next((claim.master for claim in claims if claim.master is not None), None)
    address = environ.get("MASTER_ADDR") or known
    if not address:
        raise SettingError(f"{whole.launcher}: {whole.names[0]}={rank} of {whole.names[1]}={size} is set, MASTER_ADDR "
                           "is not, and nothing else says where rank 0 is",
                           legal="MASTER_ADDR, the address of rank 0's host (mpirun -x MASTER_ADDR=10.0.0.1)")
    port = number(environ, "MASTER_PORT")
    if port is not None and not 0 < port < 65536:
        raise SettingError(f"MASTER_PORT={port}", legal="a port from 1 to 65535")
    job = next((claim.job for claim in claims if claim.job), None) if table is None else None
    if port is None:
        port = PORT if job is None else JOB_PORTS[zlib.crc32(job.encode()) % len(JOB_PORTS)]
    return Place(whole.launcher, rank, size, device, devices, address, port, agent, table)
