"""`RunSettings`: the settings of one ``shardwright run``, checked and with every default filled in.

Example: ``--worker_num=8 --local_worker_num=4 --node_rank=1`` is the second of two nodes, with global ranks 4 to 7.
"""

from __future__ import annotations

import argparse
import errno
import os
import socket
from dataclasses import dataclass

from ..errors import SettingError

__all__ = ["RunSettings", "check_port"]


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

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> RunSettings:
        """The settings of parsed arguments; an argument that was not given is None.

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
        options = [
            "worker_num",
            "local_worker_num",
            "master_addr",
            "master_port",
            "node_rank",
            "log_dir",
            "cluster_time_out",
            "max_restarts",
            "grace_period",
        ]
        if self.threads is not None:
            options.append("threads")
        return [*(f"--{name}={getattr(self, name)}" for name in options), self.script, *self.script_args]


def check_script(path: str) -> None:
    """Raise a SettingError if there is no such file, before eight workers start and each report it."""
    if not os.path.isfile(path):
        raise SettingError(f"script {path} is {'not a file' if os.path.exists(path) else 'not found'}")


def check_port(
    port: int, name: str = "--master_port", other: str = "choose another, or 0, for any free one, on a single node"
) -> None:
    """Raise a SettingError if this machine cannot listen on the port. Port 0 always passes.

    Both address families are tried: the rendezvous listens on IPv6 and IPv4 together where the machine has both.

    Args:
        port: the port.
        name: the option or variable that sets it, for errors.
        other: the advice of the error where it is in use.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # As the rendezvous does: a port whose last connections are in TIME_WAIT counts as free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SettingError(f"port {port} ({name}) is in use by another process; {other}") from None
            if error.errno == errno.EACCES:
                raise SettingError(f"port {port} ({name}) is not for this user; those from 1024 are") from None
            # Any other error: this machine does not have the address family.
