"""Rendezvous: the meeting of a run's nodes, their news of failures, and the meeting of ranks without an agent.

1. Nodes (`Nodes`). Node 0 listens on ``master_addr:master_port`` and holds a key-value store; the others connect to
   it; the node ranks are given, not discovered. The protocol is torchrun's static rendezvous, with seven differences
   that keep it from hanging, and strangers out:

   a. Waiting is done here, by a look at the store every fifth of a second, and not inside the store: Ctrl-C works,
      and a timeout names the missing nodes. The first node to give up tells the others.
   b. Port 0 is any free port. The store itself is asked for the port it got, so no other process can take it between.
   c. Two nodes with the same rank, or of different sizes, are an error that says so.
   d. When a worker fails, its node writes the failure into the store, and the other nodes end their workers. A store
      that does not answer counts as a failure of node 0.
   e. Each node increments a counter in the store while its workers run. Node 0 checks that the counters still grow: a
      host that lost its power or its network sends no news.

   f. Node 0 listens at ``master_addr`` alone (`listening`), which is 127.0.0.1 for one node.
   g. Nodes that do not know the run's token are not taken (`admitted`). A launcher of one node makes the token; on
      several nodes the user sets it.

   The store stays for the workers: their ``MASTER_ADDR`` and ``MASTER_PORT`` lead to it, as under torchrun. Restarted
   workers get a new store, on any free port of node 0: the old one holds keys of the dead workers.

2. Ranks that no agent brings together (`meet`): under a rank table, MPI, Slurm, or started by hand. Rank 0 listens
   and holds torch's key-value store. Each rank registers there, and the last one writes that all have come. A rank
   that waits in vain can therefore name the missing ranks, and ranks of two runs, with two rank tables or two tokens,
   are told apart before anything is sent between them.
"""

from __future__ import annotations

import contextlib
import hmac
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

from ..errors import SettingError, ShardwrightError
from .console import logger
from .environment import TOKEN, RankInRun, is_loopback
from .run_settings import RunSettings, bound, check_port

__all__ = ["LaunchError", "NodeFailure", "Nodes", "admitted", "meet"]

LOOK = 0.2  # seconds between two looks at the store, while there is nothing else to do
LISTEN = 1.0  # seconds between two looks while workers run
ANSWER = 10.0  # seconds in which the store must answer
LEAVE = 5.0  # seconds that node 0 keeps the store for nodes that may not have read their last news
SILENT = 20.0  # seconds without news after which a node counts as lost; ending its workers may take more than 10
NAMED = 8  # missing nodes that an error names at most

T = TypeVar("T")


class LaunchError(ShardwrightError):
    """A run that could not be started: nodes that did not come, or an address that does not answer."""


class _NoAnswer(Exception):
    """The store is gone or silent."""


@dataclass(frozen=True)
class NodeFailure:
    """The reason why a node's part of the run ended.

    Args:
        node: its rank.
        code: the exit code of the run there.
        text: the reason, as it is shown on other nodes.
        kind: "worker": one of its workers failed; "signal": it was told to end; "lost": it is gone.
    """

    node: int
    code: int
    text: str
    kind: str = "lost"


# -- who may come ------------------------------------------------------------------------------------------------------


def listening(address: str, port: int, several: bool, seconds: float) -> TCPStore:
    """A store that listens at one address of this host.

    Args:
        address, port, several: as in `run_settings.bound`.
        seconds: the longest wait of a request.

    Raises:
        RuntimeError: it cannot be opened.
    """
    try:
        listener = bound(address, port, several)
    except OSError as error:
        raise RuntimeError(error.strerror) from error
    listens, port = listener.getsockname()[:2]
    if listens in ("::", "0.0.0.0") and address not in ("::", "0.0.0.0"):
        logger.warning(
            "%s is no address of this host that others reach: the rendezvous listens on all addresses, port %d",
            address,
            port,
        )
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=listener.detach(),
    )


_PROOF = "shardwright/proof"


def admitted(store: Store, token: str, first: bool, where: str) -> Store:
    """The part of a store that those find who know the run's token.

    All keys have a prefix made of the token. A process that knows another token, or none, is told so here: it would
    otherwise meet no other node, and wait.

    Args:
        store: that of the run. torch's server itself asks for no password.
        token: that of this process; "": none.
        first: True for the process that opens the store to others.
        where: the run and the address, for errors.

    Raises:
        SettingError: the token of the run is another one.
    """
    proof = _made_of(token, "proof")
    if first:
        store.set(_PROOF, proof)
    try:
        theirs = store.get(_PROOF).decode(errors="replace")
    except RuntimeError as error:
        raise SettingError(f"the first process of {where} did not come: {str(error).splitlines()[0]}") from None
    if not hmac.compare_digest(theirs.encode(), proof.encode()):
        has = "this process has no token" if not token else "this process has another token"
        raise SettingError(
            "this process has a token, and the run has none"
            if theirs == _made_of("", "proof")
            else f"{where} takes those alone who know its token, and {has}",
            legal=f"another address and port for each run; {TOKEN} the same in the environment of all its processes",
        )
    return PrefixStore(_made_of(token, "keys"), store)


def _made_of(token: str, purpose: str) -> str:
    """A text that only those can make who know the token."""
    return hmac.new(token.encode(), f"shardwright {purpose}".encode(), "sha256").hexdigest()[:32] if token else "open"


class Nodes(RendezvousHandler):
    """The rendezvous of one run, seen from one node, in the form that torchrun's engine takes.

    Args:
        settings: the run.
        say: called with a line for the user, whenever the number of nodes that have come changes.

    Attributes:
        attempt: the number of restarts so far: nodes meet anew for each.
    """

    def __init__(self, settings: RunSettings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._listened = 0.0
        self._counts: dict[int, tuple[int, float]] = {}  # other node -> its counter, and the time of its last change
        self._deadline = time.monotonic() + settings.cluster_time_out
        self.attempt = 0
        self._server: TCPStore | None = None
        self._open: Store | None = None  # the part of the server for those who know the run's token
        self._workers: TCPStore | None = None
        self._news: Store | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes.

        Raises:
            LaunchError: the nodes do not all come in time, or contradict one another.
            SettingError: the port is taken.
        """
        settings, attempt = self._settings, self.attempt
        if self._server is None:
            self._server = self._connect()
            self._open = self._admitted(self._server)
        assert self._open is not None
        self._news = PrefixStore(f"shardwright/{attempt}", self._open)
        self._counts, self._deadline = {}, time.monotonic() + settings.cluster_time_out
        if attempt and settings.node_rank == 0:
            self._workers = self._listening(0)
            self._news.set("port", str(self._workers.port))
        if settings.nodes > 1:
            self._meet(self._news)
        port = int(self._news.get("port")) if attempt else self._server.port
        return RendezvousInfo(
            PrefixStore(f"torchelastic/{attempt}", self._open),
            settings.node_rank,
            settings.nodes,
            RendezvousStoreInfo(settings.master_addr, port),
        )

    def _connect(self) -> TCPStore:
        settings, where = self._settings, f"{self._settings.master_addr}:{self._settings.master_port}"
        host = settings.node_rank == 0
        if host:
            check_port(settings.master_addr, settings.master_port, settings.nodes > 1)
        else:
            self._await_port()
        try:
            store = (
                self._listening(settings.master_port)
                if host
                else TCPStore(
                    settings.master_addr,
                    settings.master_port,
                    is_master=False,
                    timeout=timedelta(seconds=min(30, settings.cluster_time_out)),
                )
            )
        except RuntimeError as error:
            raise LaunchError(
                f"the rendezvous at {where} cannot be {'opened' if host else 'reached'}: {str(error).splitlines()[0]}"
            ) from error
        store.set_timeout(timedelta(seconds=settings.cluster_time_out))
        return store

    def _admitted(self, server: TCPStore) -> Store:
        settings = self._settings
        where = f"{settings.master_addr}:{server.port}"
        if settings.node_rank == 0 and not settings.token:
            self._say(f"no {TOKEN} is set: whoever reaches {where} can join this run")
        try:
            return admitted(server, settings.token, settings.node_rank == 0, f"the run at {where}")
        except SettingError as error:
            raise LaunchError(f"node {settings.node_rank}: {error.message}") from None

    def _listening(self, port: int) -> TCPStore:
        settings = self._settings
        return listening(settings.master_addr, port, settings.nodes > 1, min(30, settings.cluster_time_out))

    def _await_port(self) -> None:
        """Wait until node 0 listens: the nodes are started by hand or by a scheduler, in any order."""
        settings = self._settings
        where, announced = f"{settings.master_addr}:{settings.master_port}", False
        while True:
            try:
                socket.create_connection((settings.master_addr, settings.master_port), timeout=5).close()
                return
            except OSError as error:
                if time.monotonic() > self._deadline:
                    raise LaunchError(
                        f"node 0 did not answer at {where} within {settings.cluster_time_out} s: {error}"
                    ) from None
            if not announced:
                self._say(f"node {settings.node_rank}: waiting for node 0 at {where}")
                announced = True
            time.sleep(LOOK)

    def _meet(self, news: Store) -> None:
        settings = self._settings
        mine = f"--worker_num={settings.worker_num} --local_worker_num={settings.local_worker_num}"
        announced = None
        try:
            theirs = self._ask(lambda: news.compare_set("shape", "", mine)).decode()
            if theirs != mine:
                raise LaunchError(f"node {settings.node_rank} was started with {mine}, an earlier one with {theirs}")
            if self._ask(lambda: news.add(f"node/{settings.node_rank}", 1)) > 1:
                raise LaunchError(f"two nodes were started with --node_rank={settings.node_rank}")
            arrived = self._ask(lambda: news.add("nodes", 1))
            while arrived < settings.nodes:
                if arrived != announced:
                    self._say(f"node {settings.node_rank}: {arrived} of {settings.nodes} nodes have come")
                    announced = arrived
                given_up = self.heard(now=True)
                if given_up is not None:
                    self._part(news)
                    raise LaunchError(f"node {given_up.node} gave up waiting: {given_up.text}")
                if time.monotonic() > self._deadline:
                    raise LaunchError(self._give_up(news))
                time.sleep(LOOK)
                arrived = self._ask(lambda: news.add("nodes", 0))
        except _NoAnswer as error:
            raise LaunchError(f"{error} while the nodes were meeting") from error

    def _give_up(self, news: Store) -> str:
        """Tell the other nodes which nodes did not come; the text."""
        settings = self._settings
        missing = self._ask(lambda: [n for n in range(settings.nodes) if not news.check([f"node/{n}"])])
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        arrived = settings.nodes - len(missing)
        text = (
            f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:NAMED]))}{more} did not come "
            f"within {settings.cluster_time_out} s, {arrived} of {settings.nodes} did"
        )
        self.tell(1, text)
        self._part(news)
        return text

    def _part(self, news: Store) -> None:
        """Leave a failed meeting. Node 0 keeps the store a moment, so that the nodes that came can read the reason."""
        departed = self._ask(lambda: news.add("left", 1))
        until = time.monotonic() + LEAVE
        while (
            self._settings.node_rank == 0
            and time.monotonic() < until
            and departed < self._ask(lambda: news.add("nodes", 0))
        ):
            time.sleep(LOOK)
            departed = self._ask(lambda: news.add("left", 0))

    def _ask(self, question: Callable[[], T]) -> T:
        """The answer of the store to one question, asked in a thread of its own.

        A vanished machine never answers, and the store's C++ client would wait for it, deaf to Ctrl-C and to the
        workers.
        """
        answers: queue.SimpleQueue[tuple[T, None] | tuple[None, RuntimeError]] = queue.SimpleQueue()

        def put() -> None:
            try:
                answers.put((question(), None))
            except RuntimeError as error:
                answers.put((None, error))

        threading.Thread(target=put, daemon=True, name="question to node 0").start()
        try:
            answer = answers.get(timeout=ANSWER)
        except queue.Empty:
            raise _NoAnswer("node 0 does not answer") from None
        if answer[1] is not None:
            raise _NoAnswer("node 0 is gone") from answer[1]
        return answer[0]

    def tell(self, code: int, text: str, node: int | None = None, kind: str = "lost") -> None:
        """Tell the other nodes that the run has failed here, or on `node`. The first failure written counts.

        Args:
            code: the exit code of the run.
            text: the reason, as it is shown on other nodes.
            node: the node that failed; None: this one.
            kind: see `NodeFailure`.
        """
        news = self._news
        if news is None or self._settings.nodes == 1:
            return
        failure = json.dumps(asdict(NodeFailure(self._settings.node_rank if node is None else node, code, text, kind)))
        with contextlib.suppress(_NoAnswer):  # the other nodes see that the store is gone as well
            self._ask(lambda: news.compare_set("failure", "", failure))

    def heard(self, *, now: bool = False) -> NodeFailure | None:
        """The failure that another node told, or the loss of a node; None where the run was well at the last look.

        A look at the store is taken at most once a second.

        Args:
            now: look at once, however recent the last look is.
        """
        news = self._news
        if news is None or self._settings.nodes == 1:
            return None
        if not now and time.monotonic() < self._listened + LISTEN:
            return None
        self._listened = time.monotonic()
        try:
            if self._ask(lambda: news.check(["failure"])):
                return NodeFailure(**json.loads(self._ask(lambda: news.get("failure"))))
            self._ask(lambda: news.add(f"alive/{self._settings.node_rank}", 1))
            lost = self._lost(news) if self._settings.node_rank == 0 else None
        except _NoAnswer as error:
            return NodeFailure(0, 1, str(error))
        if lost is not None:
            self.tell(lost.code, lost.text, node=lost.node)
        return lost

    def _lost(self, news: Store) -> NodeFailure | None:
        """The failure of a node whose counter has not grown for too long, on node 0; None where there is none.

        A node that ends tells its reason before it leaves, so silence means loss.
        """
        counts = self._ask(lambda: {node: news.add(f"alive/{node}", 0) for node in range(1, self._settings.nodes)})
        now = time.monotonic()
        for node, count in counts.items():
            if self._counts.get(node, (0, now))[0] != count or not count:
                self._counts[node] = (count, now)
            elif now - self._counts[node][1] > SILENT:
                return NodeFailure(node, 1, f"nothing was heard of it for {SILENT:.0f} s")
        return None

    def leave(self, *, finished: bool) -> NodeFailure | None:
        """Wait for the other nodes before this one leaves.

        A node whose workers have finished waits until all have, or until one tells of a failure. A node that failed
        does not wait, except node 0, which keeps the store a moment so that the others can read the reason.

        Returns:
            The failure of another node, or None.
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
            while (
                self._settings.node_rank == 0
                and time.monotonic() < until
                and self._ask(lambda: news.add("left", 0)) < nodes
            ):
                time.sleep(LOOK)
        except _NoAnswer as error:
            return failure or NodeFailure(0, 1, str(error))
        return failure

    # The rest of the engine's rendezvous interface. Nodes neither join nor leave a running run.

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


# -- ranks without an agent --------------------------------------------------------------------------------------------

PATIENCE = timedelta(seconds=1)  # duration of one look at the store: Ctrl-C is handled between two looks
LEAVE_RANKS = 2.0  # seconds that rank 0 keeps the store after an error, so that the others can read it
NAMED_RANKS = 8  # missing ranks that an error names at most


def meet(place: RankInRun, seconds: float, token: str) -> Store:
    """Wait for all ranks.

    Args:
        place: the place of this process in the run.
        seconds: the longest wait.
        token: the run's; "": none.

    Returns:
        The store that the ranks share, for a process group.

    Raises:
        SettingError: ranks do not come, come twice, or have other settings; an address that cannot be used.
    """
    return _Meeting(place, seconds, token).store()


class _Meeting:
    def __init__(self, place: RankInRun, seconds: float, token: str) -> None:
        self._place, self._token = place, token
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._where = f"{place.master_addr}:{place.master_port}"

    def store(self) -> Store:
        server = self._connect()
        store = admitted(server, self._token, self._place.rank == 0, f"the ranks at {self._where}")
        news = PrefixStore("shardwright", store)
        try:
            self._meet(news)
        except SettingError as error:
            self._part(news, error)
            raise
        server.set_timeout(timedelta(seconds=self._seconds))
        return PrefixStore("group", store)

    def _connect(self) -> TCPStore:
        place = self._place
        several, wait = not is_loopback(place.master_addr), max(1.0, min(30.0, self._seconds))
        if place.rank == 0:
            check_port(place.master_addr, place.master_port, several, "MASTER_PORT", "set another")
        else:
            self._await_rank_0()
        try:
            if place.rank == 0:
                return listening(place.master_addr, place.master_port, several, wait)
            return TCPStore(place.master_addr, place.master_port, is_master=False, timeout=timedelta(seconds=wait))
        except RuntimeError as error:
            raise self._fault(
                f"rank {place.rank} cannot {'open' if place.rank == 0 else 'reach'} the store at "
                f"{self._where}: {str(error).splitlines()[0]}"
            ) from error

    def _await_rank_0(self) -> None:
        place = self._place
        while True:
            try:
                socket.create_connection((place.master_addr, place.master_port), timeout=5).close()
                return
            except OSError as error:
                if time.monotonic() > self._deadline:
                    raise self._fault(
                        f"{place.whereabouts(0)} did not answer at {self._where} within {self._seconds:g} s: {error}"
                    ) from None
            time.sleep(LOOK)

    def _meet(self, news: Store) -> None:
        place = self._place
        ranks_text = f"{place.size} ranks" + (f" of rank table {place.table.digest}" if place.table else "")
        first = self._ask(lambda: news.compare_set("told", "", ranks_text)).decode()
        if first != ranks_text:
            raise self._fault(
                f"rank {place.rank} was told of {ranks_text}, an earlier one of {first}",
                "the same number of ranks and the same rank table for all",
            )
        if self._ask(lambda: news.add(f"rank/{place.rank}", 1)) > 1:
            raise self._fault(
                f"two processes that are rank {place.rank} have come to {self._where}",
                "each rank once; another MASTER_PORT for each run on one host",
            )
        if self._ask(lambda: news.add("come", 1)) == place.size:
            self._ask(lambda: news.set("end", ""))
        while not self._announced_by_all(news):
            if time.monotonic() > self._deadline:
                missing = self._ask(lambda: [rank for rank in range(place.size) if not news.check([f"rank/{rank}"])])
                names = ", ".join(place.whereabouts(rank) for rank in missing[:NAMED_RANKS])
                more = f" and {len(missing) - NAMED_RANKS} more" if len(missing) > NAMED_RANKS else ""
                raise self._fault(
                    f"{names}{more} of the {place.size} ranks that {place.launcher} counts did not come to "
                    f"{self._where} within {self._seconds:g} s"
                )

    def _announced_by_all(self, news: Store) -> bool:
        """True where all ranks have come; waits for a moment. Another rank's error is raised here too."""
        try:
            news.wait(["end"], PATIENCE)
        except RuntimeError:
            if not self._ask(lambda: news.check(["end"])):
                return False
        fault = self._ask(lambda: news.get("end")).decode()
        if fault:
            raise self._fault(fault)
        return True

    def _part(self, news: Store, error: SettingError) -> None:
        """Tell the other ranks the error: otherwise each finds it on its own, or finds the store gone."""
        try:
            news.compare_set("end", "", error.message)
        except RuntimeError:
            return
        if self._place.rank == 0:
            time.sleep(LEAVE_RANKS)

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except RuntimeError as error:
            raise self._fault(f"rank 0 is gone from {self._where} while the ranks were meeting") from error

    def _fault(self, message: str, legal: str | None = None) -> SettingError:
        return SettingError(
            message,
            legal=legal
            or "all ranks started, and MASTER_ADDR and MASTER_PORT an address of rank 0's host that the others reach; "
            f"no variables of {self._place.launcher} where this process is to be alone",
        )
