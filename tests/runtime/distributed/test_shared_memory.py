"""Collectives of one host through memory that its ranks share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, run_ranks
from test_collectives import ALL, WORLD, A, assert_as_in_one_process, convert, ended, every_pair, layouts, local

from shardwright.redistribution import redistribution
from shardwright.runtime.distributed import collectives, shared_memory
from shardwright.runtime.distributed.gradient_sums import SumInTurns
from shardwright.runtime.distributed.process_groups import ProcessGroups
from shardwright.runtime.distributed.shared_memory import SameHost
from shardwright.runtime.local.shards import convert_shards

pytestmark = pytest.mark.skipif(shared_memory._calls is None, reason="ranks share memory on Linux alone")
WAIT = timedelta(seconds=60)
FILES = Path("/dev/shm")


def through_memory(rank: int, world: int, chunk: int) -> dict[Any, torch.Tensor]:
    shared_memory.CHUNK = chunk
    if chunk < 1 << 20:
        shared_memory.SHORT = 0
    sent = []
    kept = ProcessGroups.seen

    def seen(self: ProcessGroups, digits: Any) -> Any:
        group = kept(self, digits)
        assert group.host is not None
        sent.append(group)
        return group

    ProcessGroups.seen = seen
    collectives._ops = None  # who asks for a collective of the library's fails
    dist.ProcessGroup.alltoall_base = lambda *a, **k: pytest.fail("Gloo was asked")
    found = every_pair(rank, world, None, True)
    assert sent
    return found


@pytest.mark.parametrize("chunk", [1 << 20, 512])  # 512: several rounds, the last of them shorter
def test_every_kind_of_step(chunk: int) -> None:
    assert_as_in_one_process(run_ranks(through_memory, WORLD, chunk))


def types(rank: int, world: int) -> dict[Any, torch.Tensor]:
    groups, out = ProcessGroups(world, rank, share=True), {}
    for name in ("all_reduce", "all_reduce_of_a_slice", "reduce_scatter_two_dims"):
        for reduction in ("sum", "max", "min"):
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool):
                for shape in ((4, 4, 4), (64, 64, 68)):
                    source, target = layouts(name, reduction)
                    out[name, reduction, dtype, shape] = convert(
                        redistribution(source, target), local(source, shape, rank, dtype), rank, groups
                    )
    for name in ("all_gather", "permute", "all_to_all"):
        for dtype in (torch.bool, torch.int32, torch.bfloat16, torch.complex64, torch.complex128):
            source, target = layouts(name)
            out[name, "sum", dtype, (4, 4, 4)] = convert(
                redistribution(source, target), local(source, (4, 4, 4), rank, dtype), rank, groups
            )
    return out


def test_reductions_and_types() -> None:
    results = run_ranks(types, WORLD)
    for name, reduction, dtype, shape in results[0]:
        source, target = layouts(name, reduction)
        shards = [local(source, shape, r, dtype) for r in range(WORLD)]
        for rank, expected in enumerate(convert_shards(redistribution(source, target), shards, stepwise=True)):
            got = results[rank][name, reduction, dtype, shape]
            assert got.dtype == dtype and torch.equal(got, expected), (name, reduction, dtype, shape)


LENGTHS = (0, 1, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 1000, 4099)


def of_many_lengths(rank: int, world: int) -> list[tuple[torch.Tensor, ...]]:
    shared_memory.CHUNK, shared_memory.SHORT = 512, 0  # 128 numbers a round
    groups, out = ProcessGroups(world, rank, share=True), []
    group = groups.seen(layouts("all_reduce")[0].partial)
    torch.manual_seed(rank)
    for length in LENGTHS:
        x = torch.randn(length)
        before = x.clone()
        summed, gathered = group.host.all_reduce(x, "sum"), group.host.gather(x)
        mine = group.host.reduce_scatter(torch.cat((x,) * world), "sum")
        assert torch.equal(group.host.exchange(torch.cat((x,) * world)), gathered)
        assert torch.equal(x, before)
        in_turns = ended(SumInTurns((ALL,), groups)(x.clone()))
        same = group.host.all_reduce(x, "sum", x)
        assert same is x
        out.append((before, summed, mine, in_turns, x, gathered))
    return out


def test_sums_of_any_length_are_taken_in_the_order_of_the_ranks() -> None:
    results = run_ranks(of_many_lengths, WORLD)
    for number, length in enumerate(LENGTHS):
        terms = [results[r][number][0] for r in range(WORLD)]
        in_order = ((terms[0] + terms[1]) + terms[2]) + terms[3]
        for rank in range(WORLD):
            *_, gathered = results[rank][number]
            assert torch.equal(gathered, torch.cat(terms)), (length, rank)
            for way, got in enumerate(results[rank][number][1:-1]):
                assert torch.equal(got, in_order), (length, rank, way)


def groups_side_by_side(rank: int, world: int) -> bool:
    """Ranks of two groups meet by turns, and at unlike paces."""
    groups = ProcessGroups(world, rank, share=True)
    pairs, everybody = groups.seen((A,)), groups.seen((ALL,))
    for turn in range(300):
        if (turn + rank) % 7 == 0:
            time.sleep(0.001)
        x = torch.full((1 + turn * 7,), float(rank + turn))
        assert torch.equal(pairs.host.all_reduce(x, "sum"), torch.full_like(x, 2.0 * (rank % 2) + 2 + 2 * turn))
        assert torch.equal(everybody.host.gather(x).view(world, -1)[:, 0], torch.arange(4.0) + turn)
    return True


def test_groups_that_meet_by_turns() -> None:
    assert all(run_ranks(groups_side_by_side, WORLD))


def test_the_file_is_this_users_alone_and_no_other_file_is_opened(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(shared_memory, "_FOLDER", str(tmp_path))
    file, nonce, path = shared_memory._made(shared_memory._head(2), 2)
    name = Path(path).name
    assert os.fstat(file).st_mode & 0o777 == 0o600
    os.close(shared_memory._opened(nonce + name.encode()))
    (tmp_path / "shardwright-link").symlink_to(path)
    for reported in (b"", nonce, b"0" * 16 + name.encode(), nonce + b"shardwright-link", nonce + f"../{path}".encode()):
        assert shared_memory._opened(reported) is None, reported
    os.close(file)


def left_of(names: set[str]) -> set[str]:
    """Those of some files that stay. Ranks of other tests have such files too, for a while."""
    until = time.monotonic() + 60
    while names & files() and time.monotonic() < until:
        time.sleep(0.05)
    return names & files()


def files() -> set[str]:
    return {p.name for p in FILES.glob("shardwright-*")}


def not_shared(rank: int, world: int, why: str) -> tuple[bool, set[str], torch.Tensor]:
    if why == "not wanted by one" and rank == 2:
        os.environ["SHARDWRIGHT_SHARED_MEMORY"] = "0"
    if why == "no memory for one" and rank == 1:
        shared_memory._reserved = lambda *a: False
    if why == "no memory at all":
        shared_memory._FOLDER = "/dev/null/none"
    if why == "another host" and rank == 3:
        shared_memory._opened = lambda reported: None
    if why == "another file of the name" and rank == 3:
        opened = shared_memory._opened
        shared_memory._opened = lambda reported: opened(b"0" * 16 + reported[16:])
    groups = ProcessGroups(world, rank)
    source, target = layouts("all_reduce")
    got = convert(redistribution(source, target), local(source, (4, 4, 4), rank), rank, groups)
    return groups.seen((ALL,)).host is None, files(), got


@pytest.mark.parametrize(
    "why", ["not wanted by one", "no memory for one", "no memory at all", "another host", "another file of the name"]
)
def test_all_ranks_leave_it_to_gloo(why: str) -> None:
    before = files()
    results = run_ranks(not_shared, WORLD, why)
    source, target = layouts("all_reduce")
    shards = [local(source, (4, 4, 4), r) for r in range(WORLD)]
    expected = convert_shards(redistribution(source, target), shards, stepwise=True)
    for rank, (alone, left, got) in enumerate(results):
        assert alone and left_of(left - before) == set() and torch.equal(got, expected[rank])


def descriptors() -> int:
    """The open files of this process in the folder of shared memory; other threads open and close others."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(link.startswith(f"{FILES}/shardwright-") for link in links)


def leaves_nothing(rank: int, world: int) -> tuple[set[str], int, int]:
    before = descriptors()
    groups = ProcessGroups(world, rank, share=True)
    groups.seen((ALL,)).host.gather(torch.ones(4))
    held, left = descriptors() - before, files()
    del groups
    return left, held, descriptors() - before


def test_no_file_and_no_descriptor_is_left() -> None:
    before = files()
    made = set()
    for left, held, after in run_ranks(leaves_nothing, WORLD):
        assert held == 2 and after == 0
        made |= left - before
    assert left_of(made) == set()


def failing(rank: int, world: int, how: str) -> list[str]:
    host = SameHost.of(dist.group.WORLD, world, rank, timedelta(seconds=2.5))
    host.gather(torch.ones(3))
    if how == "silent" and rank == 1:
        dist.barrier()
        return ["", ""]
    calls: dict[int, Callable[[], Any]] = (
        {1: lambda: host.all_reduce(torch.ones(3), "sum")}
        if how == "another"
        else {1: lambda: host.gather(torch.ones(5))}
        if how == "longer"
        else {}
    )
    text = ["", ""]
    for k in range(2):
        try:
            calls.get(rank, lambda: host.gather(torch.ones(3)))()
        except RuntimeError as error:
            text[k] = str(error)
    if how == "silent":
        dist.barrier()  # rank 1 is silent, but not gone, until then
    return text


@pytest.mark.parametrize(
    "how, message",
    [
        ("silent", "have not all come for 2 s"),
        ("another", r"of 4 number 0 for an all-gather of 12 bytes, number 1 for an all-reduce of 12 bytes"),
        ("longer", r"of 4 number 0 for an all-gather of 12 bytes, number 1 for an all-gather of 20 bytes"),
    ],
)
def test_ranks_that_do_not_come_or_come_for_something_else(how: str, message: str) -> None:
    results = run_ranks(failing, WORLD, how)
    assert re.search(message, results[0][0]), results
    assert "has failed before" in results[0][1]  # what was written then is not taken for something else


@pytest.mark.parametrize("how", ["killed", "a child"])
def test_the_end_of_a_rank_is_noticed(how: str, tmp_path: Path) -> None:
    """By each of the others, and not by the end of their patience."""
    held, gate = os.pipe()
    try:
        with pytest.raises(RankFailed, match="rank 1 died with exit code -9|process of number 1 of the 4 ranks"):
            run_ranks(told_of_death, WORLD, how, tmp_path, held, gate)
    finally:
        os.close(held), os.close(gate)
    for rank in (0, 2, 3):
        text = (tmp_path / f"said_{rank}").read_text()
        assert text == "the process of number 1 of the 4 ranks of a collective has ended"


def told_of_death(rank: int, world: int, how: str, folder: Path, held: int, gate: int) -> None:
    """Rank 1 dies; a child that it has left holds its files until the test has ended."""
    host = SameHost.of(dist.group.WORLD, world, rank, WAIT)
    host.gather(torch.ones(3))
    if rank == 1 and how == "a child" and os.fork() == 0:
        os.close(gate)
        os.read(held, 1)
        os._exit(0)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        host.gather(torch.ones(3))
    except RuntimeError as error:
        (folder / f"writes_{rank}").write_text(str(error))
        (folder / f"writes_{rank}").rename(folder / f"said_{rank}")
        until = time.monotonic() + 2 * WAIT.total_seconds()
        while len(list(folder.glob("said_*"))) < world - 1 and time.monotonic() < until:
            time.sleep(0.02)  # the first that fails ends the others
        raise


def interrupted(rank: int, world: int, held: int, gate: int) -> None:
    """Signals that come while a rank waits are handled, and it waits on. Rank 0 comes when the others have handled five
    each."""

    def handle(number: int, frame: Any) -> None:
        while frame is not None and frame.f_code is not shared_memory.HostMemory._sleep.__code__:
            frame = frame.f_back
        if frame is not None:
            os.write(gate, bytes([rank]))

    host = SameHost.of(dist.group.WORLD, world, rank, 2 * WAIT)
    shared_memory._LOOK = WAIT.total_seconds()  # nothing else wakes it
    signal.signal(signal.SIGALRM, handle)
    if rank:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    else:
        handled: Counter[int] = Counter()
        while len(handled) < world - 1 or min(handled.values()) < 5:
            assert select.select([held], [], [], WAIT.total_seconds())[0], f"signals that were handled: {handled}"
            handled.update(os.read(held, 100))
    total = host.all_reduce(torch.ones(3), "sum")
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert total[0] == world


def test_signals_while_a_rank_waits() -> None:
    held, gate = os.pipe()
    try:
        run_ranks(interrupted, WORLD, held, gate)
    finally:
        os.close(held), os.close(gate)


def first_to_end(rank: int, world: int) -> float:
    """Rank 0 comes last, and takes long to wake rank 3; by then rank 1 has done all that it had to do, and is gone."""
    host = SameHost.of(dist.group.WORLD, world, rank, WAIT)
    host.all_reduce(torch.ones(3), "sum")
    if rank == 0:
        time.sleep(0.5)
        real, posts = shared_memory._calls, []

        class Slow:
            sem_trywait = real.sem_trywait

            def sem_post(self, semaphore: Any) -> None:
                posts.append(semaphore)
                if len(posts) == 2 * (world - 1):  # tickets, and then who sleeps, one after the other
                    time.sleep(2.5)
                real.sem_post(semaphore)

        shared_memory._calls = Slow()
    total = host.all_reduce(torch.ones(3), "sum")
    if rank == 1:
        fcntl.lockf(host._memory._file, fcntl.LOCK_UN, 1, 1)  # as the kernel does when a process ends
    time.sleep(3.0 if rank == 1 else 0.0)
    return float(total[0])


def test_who_has_come_may_end_before_others_are_woken() -> None:
    assert run_ranks(first_to_end, WORLD) == [WORLD] * WORLD
