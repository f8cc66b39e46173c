"""Forked processes with a time limit, and two of them as ranks that communicate.

1. `in_children` calls functions in forked processes, and kills those that do not answer: a driver, a name server or a
   backend that hangs is an answer, too. A process that has touched an accelerator can fork no process that uses it.
2. `played` is the part of one of two ranks. They meet as ranks without a launcher do, and measure a backend's
   collectives.

Example: of two functions, one that returns 3 and one that raises ``ValueError("no")``, the answers are the value 3 and
the error "ValueError: no". With a limit of 0.5 s a function that hangs has the error "no answer within 0.5 s".
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from ..errors import SettingError
from ..launch.environment import LOOPBACK, RankInRun

__all__ = ["LONG", "SHORT", "ForkedAnswer", "error_text", "in_children", "played"]

#: Messages of the two-rank test, in float32 elements: one for the latency, one for the bandwidth.
SHORT, LONG = 1, 2 << 20
ROUNDS = 5


# -- forked processes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForkedAnswer:
    """The result of a function in a forked process: a value, or an error and how to mend it."""

    value: Any = None
    error: str = ""
    mend: str = ""


def in_children(functions: Sequence[Callable[[], object]], seconds: float, together: bool = True) -> list[ForkedAnswer]:
    """Call each function in a forked process of its own, all at once. Processes that have not answered after `seconds`,
    or one second after another has failed, are killed.

    Args:
        functions: return what can be pickled.
        seconds: the longest wait.
        together: False: one that fails does not end the others.

    Returns:
        An answer for each function.
    """
    context = multiprocessing.get_context("fork")
    answers = [ForkedAnswer(error=f"no answer within {seconds:g} s")] * len(functions)
    started, pending = [], {}
    deadline, failed = time.monotonic() + seconds, False
    sys.stdout.flush()
    try:
        for index, function in enumerate(functions):
            mine, its = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(its, function), daemon=True)
            process.start()
            its.close()
            started.append(process)
            pending[mine] = index
        while pending and (remaining := deadline - time.monotonic()) > 0:
            for ready in wait(list(pending), remaining):
                assert isinstance(ready, Connection)
                index = pending.pop(ready)
                try:
                    answers[index] = ready.recv()
                except EOFError:
                    started[index].join(1)
                    answers[index] = ForkedAnswer(error=_ended(started[index].exitcode))
                ready.close()
                if answers[index].error and together:
                    failed = True
                    deadline = min(deadline, time.monotonic() + 1)
    finally:
        for process in started:
            process.kill()
            process.join(1)
        for connection in pending:
            connection.close()
    if failed:
        for index in pending.values():
            answers[index] = ForkedAnswer(error="ended, since another process failed")
    return answers


def _answer(connection: Connection, function: Callable[[], object]) -> None:
    """Send the result of a function; the main function of a forked process, whose own messages are not shown."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        connection.send(ForkedAnswer(function()))
    except SettingError as error:
        connection.send(ForkedAnswer(error=error.message, mend=error.legal or ""))
    except Exception as error:  # whatever a driver or a backend raises is the finding
        connection.send(ForkedAnswer(error=error_text(error)))


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process ended with {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


def error_text(error: BaseException) -> str:
    """Kind and first line of an error."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__


# -- two ranks ---------------------------------------------------------------------------------------------------------


def played(backend: str, interface: str, rank: int, port: int, limit: float) -> list[dict[str, object]]:
    """The part of one of two ranks: medians of an all-reduce, an all-gather and a send.

    Args:
        backend, interface: of the process group, and of its connections.
        rank: 0 or 1.
        port: of the loopback address, at which the ranks meet.
        limit: seconds that a rank waits for the other.

    Raises:
        SettingError: the ranks do not meet.
        RuntimeError: the backend fails, or a result is wrong.
    """
    os.environ[f"{backend.upper()}_SOCKET_IFNAME"] = interface
    import torch  # noqa: PLC0415  takes seconds
    import torch.distributed as dist  # noqa: PLC0415  takes seconds

    from ..accelerators import is_accelerator  # noqa: PLC0415  imports torch
    from ..launch.device_choice import device_of_rank  # noqa: PLC0415  imports torch
    from ..launch.rendezvous import meet  # noqa: PLC0415  imports torch.distributed

    torch.set_num_threads(1)  # the threads of a forked process's parent are not there
    place = RankInRun("shardwright doctor", rank, 2, rank, 2, LOOPBACK, port)
    store, device = meet(place, limit, ""), device_of_rank(place, backend)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=limit))
    figures = []
    for length in (SHORT, LONG):
        mine = torch.full((length,), rank + 1.0, device=device)
        both = [torch.zeros_like(mine), torch.zeros_like(mine)]
        result = torch.zeros_like(mine)

        def all_reduce(mine: torch.Tensor = mine, result: torch.Tensor = result) -> bool:
            dist.all_reduce(result.copy_(mine))
            return bool((result == 3).all())

        def all_gather(mine: torch.Tensor = mine, both: list[torch.Tensor] = both) -> bool:
            dist.all_gather(both, mine)
            return all(bool((row == k + 1).all()) for k, row in enumerate(both))

        def send(mine: torch.Tensor = mine, result: torch.Tensor = result) -> bool:
            for source in range(2):  # there and back
                if rank == source:
                    dist.send(mine, 1 - rank)
                else:
                    dist.recv(result, source)
            return bool((result == 2 - rank).all())

        for run, messages in ((all_reduce, 1), (all_gather, 1), (send, 2)):
            seconds = []
            for _ in range(ROUNDS + 1):  # the first connects the ranks
                dist.barrier()
                begun = time.perf_counter()
                right = run()
                if is_accelerator(device):
                    torch.accelerator.synchronize()
                seconds.append((time.perf_counter() - begun) / messages)
                if not right:
                    raise RuntimeError(f"the result of {run.__name__} is wrong")
            median = statistics.median(seconds[1:])
            nbytes = length * mine.element_size()
            figures.append(
                {
                    "operation": run.__name__,
                    "bytes": nbytes,
                    "milliseconds": median * 1e3,
                    "gigabytes_per_second": nbytes / median / 1e9,
                }
            )
    dist.barrier()
    return figures
