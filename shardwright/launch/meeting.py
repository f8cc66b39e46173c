"""How the ranks of a run meet that nobody's agent brings together: under a rank table, MPI, Slurm, or by hand.

Rank 0 listens and holds torch's key-value store; each rank notes there that it has come, and the last one says that all
have. Whoever waits in vain can so name the ranks that are missing, and ranks of two runs, or with two rank tables, are
told apart before anything is sent between them.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from shardwright.errors import SettingError
from shardwright.launch.environment import Place
from shardwright.launch.settings import check_port

__all__ = ["meet"]

LOOK = 0.2  # seconds between two tries to reach rank 0
PATIENCE = timedelta(seconds=1)  # of one look at the store: Ctrl-C is heard between two
LEAVE = 2.0  # seconds that rank 0 keeps the store, so that the others can read why it ends
NAMED = 8  # how many of the missing ranks an error names

T = TypeVar("T")


def meet(place: Place, seconds: float) -> Store:
    """Wait for all ranks.

    Args:
        place: of this process.
        seconds: how long to wait.

    Returns:
        The store that they share, for a process group.

    Raises:
        SettingError: ranks that do not come, come twice, or were told something else; an address that cannot be used.
    """
    return _Meeting(place, seconds).store()


class _Meeting:
    def __init__(self, place: Place, seconds: float) -> None:
        self._place = place
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._where = f"{place.master_addr}:{place.master_port}"

    def store(self) -> Store:
        server = self._connect()
        news = PrefixStore("shardwright", server)
        try:
            self._meet(news)
        except SettingError as error:
            self._part(news, error)
            raise
        server.set_timeout(timedelta(seconds=self._seconds))
        return PrefixStore("group", server)

    def _connect(self) -> TCPStore:
        place = self._place
        if place.rank == 0:
            check_port(place.master_port, "MASTER_PORT", "set another")  # torch would say so in ten lines
        else:
            self._await_rank_0()
        try:
            return TCPStore(place.master_addr, place.master_port, is_master=place.rank == 0, wait_for_workers=False,
                            timeout=timedelta(seconds=max(1.0, min(30.0, self._seconds))))
        except RuntimeError as error:
            raise self._fault(f"rank {place.rank} cannot {'open' if place.rank == 0 else 'reach'} the store at "
                              f"{self._where}: {str(error).splitlines()[0]}") from error

    def _await_rank_0(self) -> None:
        place = self._place
        while True:
            try:
                socket.create_connection((place.master_addr, place.master_port), timeout=5).close()
                return
            except OSError as error:
                if time.monotonic() > self._deadline:
                    raise self._fault(f"{place.whereabouts(0)} did not answer at {self._where} within "
                                      f"{self._seconds:g} s: {error}") from None
            time.sleep(LOOK)

    def _meet(self, news: Store) -> None:
        place = self._place
        told = f"{place.size} ranks" + (f" of rank table {place.table.digest}" if place.table else "")
        first = self._ask(lambda: news.compare_set("told", "", told)).decode()
        if first != told:
            raise self._fault(f"rank {place.rank} was told of {told}, an earlier one of {first}",
                              "the same number of ranks and the same rank table for all")
        if self._ask(lambda: news.add(f"rank/{place.rank}", 1)) > 1:
            raise self._fault(f"two processes that are rank {place.rank} have come to {self._where}",
                              "each rank once; another MASTER_PORT for each run on one host")
        if self._ask(lambda: news.add("come", 1)) == place.size:
            self._ask(lambda: news.set("end", ""))
        while not self._told(news):
            if time.monotonic() > self._deadline:
                missing = self._ask(lambda: [rank for rank in range(place.size) if not news.check([f"rank/{rank}"])])
                names = ", ".join(place.whereabouts(rank) for rank in missing[:NAMED])
                more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
                raise self._fault(f"{names}{more} did not come to {self._where} within {self._seconds:g} s")

    def _told(self, news: Store) -> bool:
        """Have all come? Waits for a moment. Another rank's fault is raised here too."""
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
        """Tell the others, who would otherwise learn of it one by one, or from a store that is gone."""
        try:
            news.compare_set("end", "", error.message)
        except RuntimeError:
            return
        if self._place.rank == 0:
            time.sleep(LEAVE)

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except RuntimeError as error:
            raise self._fault(f"rank 0 is gone from {self._where} while the ranks were meeting") from error

    def _fault(self, message: str, legal: str | None = None) -> SettingError:
        return SettingError(message, legal=legal or "all ranks started, and MASTER_ADDR and MASTER_PORT an address of "
                            "rank 0's host that the others reach")
