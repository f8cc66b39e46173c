"""`RunSettings`: the settings of one ``shardwright run``, checked and with every default filled in.

Example: ``--worker_num=8 --local_worker_num=4 --node_rank=1`` is the second of two nodes, with global ranks 4 to 7.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import secrets
import socket
from dataclasses import dataclass

from ..errors import SettingError
from .environment import is_loopback

__all__ = ["RunSettings", "bound", "check_port"]

#: The options of ``shardwright run`` that say how workers run; each is an attribute of `RunSettings`.
WORKER_OPTIONS = (
    "worker_num",
    "local_worker_num",
    "master_addr",
    "master_port",
    "node_rank",
    "log_dir",
    "cluster_time_out",
    "threads",
    "max_restarts",
    "grace_period",
)


@dataclass(frozen=True)
class RunSettings:
    """The settings of one run of worker processes on this node.

    Args:
        script: the Python file that every worker runs.
        script_args: its arguments, unchanged.
        worker_num: workers on all nodes together.
        local_worker_num: workers on this node; every node has the same number.
        master_addr: the address of node 0, where the rendezvous is.
        master_port: the port there; 0 takes any free one, which only a single node can do.
        node_rank: the number of this node. Its workers are ``node_rank * local_worker_num`` and up.
        log_dir: the folder of ``worker_N.log`` and ``scheduler.log``.
        cluster_time_out: seconds to wait for all nodes to meet.
        threads: ``OMP_NUM_THREADS`` of each worker; None leaves it as it is set, or 1 where it is not.
        max_restarts: the number of times that all workers are restarted after one has failed.
        grace_period: seconds that workers have to save and end after a signal that ends the run.
        token: the secret of the run, which its nodes and workers know; "": none.
    """

    script: str
    script_args: tuple[str, ...]
    worker_num: int
    local_worker_num: int
    master_addr: str
    master_port: int
    node_rank: int
    log_dir: str
    cluster_time_out: int
    threads: int | None
    max_restarts: int = 0
    grace_period: int = 30
    token: str = ""

    @classmethod
    def of(cls, arguments: argparse.Namespace, token: str = "") -> RunSettings:
        """The settings of parsed arguments; an argument that was not given is None.

        Args:
            token: the secret that the user has set for the run. Without it a run on one node makes its own.

        Raises:
            SettingError: the script does not exist, or numbers of workers and nodes contradict one another.
        """
        check_script(arguments.script)
        local = arguments.local_worker_num or arguments.worker_num
        if local is None:
            raise SettingError(
                "say how many workers to start: --worker_num or --local_worker_num; or --devices, for one process"
            )
        total = arguments.worker_num or local
        if total % local:
            raise SettingError(f"--worker_num={total} is not a whole number of nodes of --local_worker_num={local}")
        nodes, node_rank = total // local, arguments.node_rank or 0
        if node_rank >= nodes:
            raise SettingError(
                f"--node_rank={node_rank} does not exist: {total} workers, {local} on a node, make "
                f"{nodes} node{'s' if nodes > 1 else ''}, counted from 0"
            )
        if nodes > 1 and not (arguments.master_addr and arguments.master_port):
            raise SettingError(
                f"{total} workers, {local} on a node, make {nodes} nodes: each needs the "
                "--master_addr and --master_port of node 0"
            )
        log_dir = os.path.normpath(arguments.log_dir or "log_output")
        if os.path.exists(log_dir) and not os.path.isdir(log_dir):
            raise SettingError(f"--log_dir={log_dir} is a file")
        return cls(
            script=arguments.script,
            script_args=tuple(arguments.script_args),
            worker_num=total,
            local_worker_num=local,
            master_addr=arguments.master_addr or "127.0.0.1",
            master_port=arguments.master_port or 0,
            node_rank=node_rank,
            log_dir=log_dir,
            cluster_time_out=arguments.cluster_time_out or 600,
            threads=arguments.threads,
            max_restarts=arguments.max_restarts or 0,
            grace_period=30 if arguments.grace_period is None else arguments.grace_period,
            token=token or (secrets.token_hex(16) if nodes == 1 else ""),
        )

    @property
    def nodes(self) -> int:
        """The number of nodes of the run."""
        return self.worker_num // self.local_worker_num

    @property
    def ranks(self) -> range:
        """The global ranks of this node's workers."""
        first = self.node_rank * self.local_worker_num
        return range(first, first + self.local_worker_num)

    def attempt_dir(self, attempt: int) -> str:
        """The folder of an attempt's worker logs: the log directory itself, and a subfolder of it for each restart."""
        return os.path.join(self.log_dir, f"restart_{attempt}") if attempt else self.log_dir

    def worker_log(self, rank: int, attempt: int = 0) -> str:
        """The log file of the worker with this global rank, after `attempt` restarts."""
        return os.path.join(self.attempt_dir(attempt), f"worker_{rank}.log")

    @property
    def scheduler_log(self) -> str:
        """The file of the coordinator's own output. Nodes that share a disk have different ones."""
        return os.path.join(self.log_dir, f"scheduler_{self.node_rank}.log" if self.node_rank else "scheduler.log")

    def command_line(self) -> list[str]:
        """The arguments of ``shardwright run`` that give these settings again."""
        options = [name for name in WORKER_OPTIONS if getattr(self, name) is not None]
        return [*(f"--{name}={getattr(self, name)}" for name in options), self.script, *self.script_args]


def check_script(path: str) -> None:
    """Raise a SettingError if there is no such file, before eight workers start and each report it."""
    if not os.path.isfile(path):
        raise SettingError(f"script {path} is {'not a file' if os.path.exists(path) else 'not found'}")


def bound(address: str, port: int, several: bool) -> socket.socket:
    """A socket that is bound to the port at one address of this host, and listens nowhere else.

    Where other hosts are to come, the name of this host may stand for a loopback address here (``127.0.1.1`` in
    ``/etc/hosts``), and an address may be that of a router in front of this host. The socket is then bound to all
    addresses.

    Args:
        address: the address or name at which others look for this host.
        port: the port; 0: any free one.
        several: True where others are on other hosts.

    Raises:
        OSError: the port is in use, or is not for this user.
    """
    places = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    for family, _, _, _, target in places:
        if several and not is_loopback(address) and is_loopback(str(target[0])):
            continue
        with contextlib.suppress(_NotHere):
            return _bound(family, target)
    try:
        return _bound(socket.AF_INET6, ("::", port))  # and IPv4
    except _NotHere:  # this machine has no IPv6
        return _bound(socket.AF_INET, ("0.0.0.0", port))


class _NotHere(Exception):
    """An address that this host does not have."""


def _bound(family: int, target: tuple[object, ...]) -> socket.socket:
    try:
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        raise _NotHere from None
    try:
        # A port whose last connections are in TIME_WAIT counts as free.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if target[0] == "::":
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(target)
    except OSError as error:
        made.close()
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise _NotHere from None
        raise
    return made


def check_port(
    address: str,
    port: int,
    several: bool,
    name: str = "--master_port",
    other: str = "choose another, or 0, for any free one, on a single node",
) -> None:
    """Raise a SettingError if this machine cannot listen on the port. Port 0 always passes.

    Args:
        address, port, several: as in `bound`.
        name: the option or variable that sets the port, for errors.
        other: the advice of the error where it is in use.
    """
    try:
        bound(address, port, several).close()
    except socket.gaierror as error:
        raise SettingError(f"the address {address} is not known here: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SettingError(f"port {port} ({name}) is in use by another process; {other}") from None
        if error.errno == errno.EACCES:
            raise SettingError(f"port {port} ({name}) is not for this user; those from 1024 are") from None
        raise SettingError(f"port {port} ({name}) cannot be listened on: {error.strerror}") from None
