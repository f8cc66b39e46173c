"""Start real ranks from a test: forked from this process, which has imported torch already, so that it takes no time.

Each rank is one thread and one Gloo process. A rank that fails or hangs ends the others; nothing is left behind.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import io
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from forked_python import let_others_finish

from shardwright.torch_private import default_store

#: Seconds after which something is taken to hang, on the slowest and busiest of machines.
PATIENCE = 900.0

#: Seconds that ranks have to come to the end of a scenario after one rank has failed in it.
TOGETHER = 30.0


#: Modules that are imported where they are first needed: by torch for a capture, by the package for ranks.
MODULES = (
    "torch._dynamo",
    "torch.export._trace",
    "torch.distributed.tensor",
    "torch.distributed.pipelining.schedules",
    "shardwright.parallel.auto_parallel",
    "shardwright.runtime.distributed.agreement",
    "shardwright.runtime.distributed.parameters",
    "shardwright.runtime.distributed.rank_executor",
)


class RankFailed(AssertionError):
    """A rank raised, died or did not finish in time; the message holds its traceback."""


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = PATIENCE) -> list[Any]:
    """Run ``fn(rank, world, *args)`` on `world` ranks of a Gloo group; each rank's result, by rank.

    Args:
        fn: runs in the rank's process; what it returns must be picklable.
        world: the number of ranks.
        timeout: seconds for all of it.

    Raises:
        RankFailed: with the traceback of the rank that failed first, or where those stand that hang.
    """
    load_what_a_capture_needs()
    context = multiprocessing.get_context("fork")
    meeting = meeting_socket()
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    stands = [tempfile.TemporaryFile("w+") for _ in range(world)]  # noqa: SIM115  closed below
    ranks = [
        context.Process(target=_rank, args=(r, world, meeting, timeout, pipes[r][1], stands[r], fn, args), daemon=True)
        for r in range(world)
    ]
    for process, (_, sender) in zip(ranks, pipes):
        process.start()
        sender.close()
    meeting.close()
    results: dict[int, Any] = {}
    waiting = {pipes[r][0]: r for r in range(world)}
    deadline = time.monotonic() + timeout
    try:
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                until = time.monotonic() + 5
                raise RankFailed(
                    f"ranks {sorted(waiting.values())} did not finish in {timeout} s\n"
                    + "\n".join(_where(r, ranks[r], stands[r], until) for r in sorted(waiting.values()))
                )
            for receiver in ready:
                rank = waiting.pop(receiver)
                try:
                    failed, value = torch.load(io.BytesIO(receiver.recv_bytes()), weights_only=False)
                except EOFError:
                    ranks[rank].join(5)
                    raise RankFailed(f"rank {rank} died with exit code {ranks[rank].exitcode}") from None
                if failed:
                    raise RankFailed(f"rank {rank}:\n{value}")
                results[rank] = value
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        return [results[r] for r in range(world)]
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
        for receiver, _ in pipes:
            receiver.close()
        for file in stands:
            file.close()


def meeting_socket() -> socket.socket:
    """The socket at which ranks that are forked later meet, already listening. Another process may take a port that is
    only looked up, before rank 0 listens there. The other ranks then wait for rank 0 until the timeout."""
    return socket.create_server(("127.0.0.1", 0), backlog=128)


def join_group(rank: int, world: int, meeting: socket.socket, timeout: float) -> None:
    """Join the Gloo group whose store rank 0 serves at `meeting`, in a forked rank.

    Args:
        rank, world: of the group.
        meeting: as `meeting_socket` made it, before the fork. The process that forks closes its own after the fork.
        timeout: seconds of a collective.
    """
    port, limit = meeting.getsockname()[1], timedelta(seconds=timeout)
    served = meeting.detach() if rank == 0 else None
    if served is None:
        meeting.close()
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, limit, master_listen_fd=served)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


@functools.cache
def load_what_a_capture_needs() -> None:
    """Import in this process, once, what a first capture and a first step import: each rank would do it by itself."""
    for module in MODULES:
        import_module(module)


def _where(rank: int, process: Any, file: Any, until: float) -> str:
    """The lines at which the threads of a rank stand, if it says so until then."""
    os.kill(process.pid, signal.SIGUSR1)
    while not (reported := os.stat(file.fileno()).st_size) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.05)  # all of it
    file.seek(0)
    return f"rank {rank}:\n{file.read() if reported else 'says nothing'}"


def run_scenarios(rank: int, world: int, scenarios: dict[str, Callable[[int, int], None]]) -> dict[str, str | None]:
    """On a rank: each scenario in turn, from one seed; its traceback, or None where it passed."""
    results: dict[str, str | None] = {}
    for name, function in scenarios.items():
        torch.manual_seed(0)
        try:
            function(rank, world)
            results[name] = None
        except BaseException:
            results[name] = traceback.format_exc()
        gc.collect()
        gc.freeze()  # a search for optimizers walks all objects that are not frozen
        _meet(rank, world, name, results[name])
    return results


def _meet(rank: int, world: int, name: str, failure: str | None) -> None:
    """Wait for the other ranks at the end of a scenario.

    A rank that fails alone leaves the others waiting for its part of a collective. So a rank that failed waits for them
    no longer than `TOGETHER`.

    Raises:
        RankFailed: the traceback of this rank, where the others do not come.
    """
    store, until = default_store(), time.monotonic() + TOGETHER
    store.add(f"end of {name}", 1)
    while failure is not None and store.add(f"end of {name}", 0) < world:
        if time.monotonic() > until:
            raise RankFailed(f"{name}, while other ranks waited for this one:\n{failure}")
        time.sleep(0.02)
    dist.barrier()


def all_passed(results: list[dict[str, str | None]]) -> None:
    """Each scenario that failed is told once, with every traceback that is another one: where rank 1 fails, rank 0 may
    say that rank 1 has ended."""
    failed = {name: list(dict.fromkeys(text for r in results if (text := r[name]))) for name in results[0]}
    assert not any(failed.values()), "\n\n".join(
        "\n".join((f"{name}:", *tracebacks)) for name, tracebacks in failed.items() if tracebacks
    )


def _rank(
    rank: int, world: int, meeting: socket.socket, timeout: float, sender: Any, stands: Any, fn: Callable, args: tuple
) -> None:
    code = 0
    faulthandler.register(signal.SIGUSR1, file=stands)
    let_others_finish()
    try:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(meeting.getsockname()[1]),
            LOCAL_WORLD_SIZE=str(world),
        )
        join_group(rank, world, meeting, timeout)
        value = fn(rank, world, *args)
        dist.barrier()  # nobody closes a connection that another still reads
        sender.send_bytes(_packed(False, value))
        dist.destroy_process_group()
    except BaseException:
        sender.send_bytes(_packed(True, traceback.format_exc()))
        code = 1
    sender.close()
    os._exit(code)  # no test runner's exit handlers in a rank


def _packed(failed: bool, value: Any) -> bytes:
    buffer = io.BytesIO()  # by value: torch's own way through a pipe is shared memory that may end with the rank
    torch.save((failed, value), buffer)
    return buffer.getvalue()
