"""How the nodes of a run meet, and how one learns that another failed.

Node 0 listens on ``master_addr:master_port`` and holds a key-value store; the others connect to it; the node ranks are
given, not found out. That is torchrun's static rendezvous, with four differences that keep it from hanging:

1. Waiting is done here, a look every fifth of a second, and not inside the store: Ctrl-C works and a timeout can say
   how many nodes came.
2. Port 0 is any free port. The store is asked which it got; there is no moment at which another process could take it.
3. Two nodes with one rank, or of different sizes, are told so.
4. When a worker fails, its node writes that into the store, and the other nodes end theirs. A store that does not
   answer counts as a failure of node 0.

The store stays for the workers: their ``MASTER_ADDR`` and ``MASTER_PORT`` lead to it, as under torchrun.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from shardwright.errors import ShardwrightError
from shardwright.launch.settings import RunSettings, check_port

__all__ = ["LaunchError", "NodeFailure", "Nodes"]

LOOK = 0.2  # seconds between two looks at the store, while there is nothing else to do
LISTEN = 1.0  # seconds between two looks while workers run
ANSWER = 10.0  # seconds in which the store must answer
LEAVE = 5.0  # seconds that node 0 keeps the store for nodes that may not have read their last news

T = TypeVar("T")


class LaunchError(ShardwrightError):
    """A run that could not be started: nodes that did not come, an address that does not answer."""


class _NoAnswer(Exception):
    """The store is gone or silent."""


@dataclass(frozen=True)
class NodeFailure:
    """Why a node's part of the run ended.

    Args:
        node: its rank.
        code: the exit code of the run there.
        text: the reason, as it is shown on other nodes.
    """

    node: int
    code: int
    text: str


class Nodes(RendezvousHandler):
    """The rendezvous of one run, seen from one node, in the form that torchrun's engine takes.

    Args:
        settings: the run.
        say: given a line for the user, whenever the number of nodes that have come changes.
    """

    def __init__(self, settings: RunSettings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._listened = 0.0
        self._deadline = time.monotonic() + settings.cluster_time_out
        self._server: TCPStore | None = None
        self._news: Store | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes.

        Raises:
            LaunchError: if they do not all come in time, or contradict one another.
            SettingError: if the port is taken.
        """
        settings = self._settings
        self._server = self._connect()
        self._news = PrefixStore("shardwright", self._server)
        if settings.nodes > 1:
            self._meet(self._news)
        return RendezvousInfo(PrefixStore("torchelastic", self._server), settings.node_rank, settings.nodes,
                              RendezvousStoreInfo(settings.master_addr, self._server.port))

    def _connect(self) -> TCPStore:
        settings, where = self._settings, f"{self._settings.master_addr}:{self._settings.master_port}"
        host = settings.node_rank == 0
        if host:
            check_port(settings.master_port)
        else:
            self._await_port()
        try:
            store = TCPStore(settings.master_addr, settings.master_port, is_master=host, wait_for_workers=False,
                             timeout=timedelta(seconds=min(30, settings.cluster_time_out)))
        except RuntimeError as error:
            raise LaunchError(f"the rendezvous at {where} cannot be {'opened' if host else 'reached'}: "
                              f"{str(error).splitlines()[0]}") from error
        store.set_timeout(timedelta(seconds=settings.cluster_time_out))
        return store

    def _await_port(self) -> None:
        """Wait until node 0 listens. The nodes are started by hand or by a scheduler, in any order."""
        settings = self._settings
        where, told = f"{settings.master_addr}:{settings.master_port}", False
        while True:
            try:
                socket.create_connection((settings.master_addr, settings.master_port), timeout=5).close()
                return
            except OSError as error:
                if time.monotonic() > self._deadline:
                    raise LaunchError(f"node 0 did not answer at {where} within {settings.cluster_time_out} s: "
                                      f"{error}") from None
            if not told:
                self._say(f"node {settings.node_rank}: waiting for node 0 at {where}")
                told = True
            time.sleep(LOOK)

    def _meet(self, news: Store) -> None:
        settings = self._settings
        mine = f"--worker_num={settings.worker_num} --local_worker_num={settings.local_worker_num}"
        told = None
        try:
            theirs = self._ask(lambda: news.compare_set("shape", "", mine)).decode()
            if theirs != mine:
                raise LaunchError(f"node {settings.node_rank} was started with {mine}, an earlier one with {theirs}")
            if self._ask(lambda: news.add(f"node/{settings.node_rank}", 1)) > 1:
                raise LaunchError(f"two nodes were started with --node_rank={settings.node_rank}")
            here = self._ask(lambda: news.add("nodes", 1))
            while here < settings.nodes:
                if here != told:
                    self._say(f"node {settings.node_rank}: {here} of {settings.nodes} nodes have come")
                    told = here
                if time.monotonic() > self._deadline:
                    raise LaunchError(f"{here} of {settings.nodes} nodes came within {settings.cluster_time_out} s")
                time.sleep(LOOK)
                here = self._ask(lambda: news.add("nodes", 0))
        except _NoAnswer as error:
            raise LaunchError(f"{error} while the nodes were meeting") from error

    def _ask(self, question: Callable[[], T]) -> T:
        """Put one question to the store, in a thread of its own.

        A machine that vanished answers never, and the store's client, C++, would wait for it deaf to Ctrl-C and to the
        workers.
        """
        answers: queue.SimpleQueue[tuple[T | None, RuntimeError | None]] = queue.SimpleQueue()

        def put() -> None:
            try:
                answers.put((question(), None))
            except RuntimeError as error:
                answers.put((None, error))

        threading.Thread(target=put, daemon=True, name="question to node 0").start()
        try:
            answer, error = answers.get(timeout=ANSWER)
        except queue.Empty:
            raise _NoAnswer("node 0 does not answer") from None
        if error is not None:
            raise _NoAnswer("node 0 is gone") from error
        return answer

    def tell(self, code: int, text: str) -> None:
        """Let the other nodes know that the run has failed here. The first to say so is believed."""
        news = self._news
        if news is None or self._settings.nodes == 1:
            return
        failure = json.dumps(asdict(NodeFailure(self._settings.node_rank, code, text)))
        try:
            self._ask(lambda: news.compare_set("failure", "", failure))
        except _NoAnswer:
            pass  # which the others see as well

    def heard(self, *, now: bool = False) -> NodeFailure | None:
        """What another node told, or that node 0 is gone; None while all is well, or was a second ago.

        Args:
            now: look at once, however recently it was done.
        """
        news = self._news
        if news is None or self._settings.nodes == 1:
            return None
        if not now and time.monotonic() < self._listened + LISTEN:
            return None
        self._listened = time.monotonic()
        try:
            if not self._ask(lambda: news.check(["failure"])):
                return None
            return NodeFailure(**json.loads(self._ask(lambda: news.get("failure"))))
        except _NoAnswer as error:
            return NodeFailure(0, 1, str(error))

    def leave(self, *, finished: bool) -> NodeFailure | None:
        """Wait for the other nodes before this one leaves.

        A node whose workers have finished waits until all have, or until one tells of a failure, which is returned. A
        node that failed does not wait, except node 0, which keeps the store a moment so that the others can read why.
        """
        news, nodes = self._news, self._settings.nodes
        if news is None or nodes == 1:
            return None
        failure = None
        try:
            if finished:
                self._ask(lambda: news.add("finished", 1))
                while self._ask(lambda: news.add("finished", 0)) < nodes and not (failure := self.heard(now=True)):
                    time.sleep(LOOK)
            self._ask(lambda: news.add("left", 1))
            until = time.monotonic() + LEAVE
            while (self._settings.node_rank == 0 and time.monotonic() < until
                   and self._ask(lambda: news.add("left", 0)) < nodes):
                time.sleep(LOOK)
        except _NoAnswer as error:
            return failure or NodeFailure(0, 1, str(error))
        return failure

    # What the engine asks of a rendezvous beside meeting. Nodes neither join nor leave a running run.

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "static"

    def get_run_id(self) -> str:
        return "shardwright"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
