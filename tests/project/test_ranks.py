"""Ranks that a test starts: one that fails ends the others, wherever they wait."""

from __future__ import annotations

import multiprocessing
import socket
import time

import pytest
import ranks
import torch
import torch.distributed as dist


def in_turn(rank: int, world: int) -> dict[str, str | None]:
    return ranks.run_scenarios(rank, world, {"both fail": both_fail, "one fails": one_fails})


def both_fail(rank: int, world: int) -> None:
    raise ValueError(f"rank {rank} has no data")


def one_fails(rank: int, world: int) -> None:
    if rank == 0:
        raise ValueError("this rank has no data")
    time.sleep(ranks.PATIENCE)  # as a rank does that waits for another in shared memory


def test_a_rank_that_fails_alone_ends_the_others_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TOGETHER", 0.5)
    with pytest.raises(ranks.RankFailed, match="one fails, while other ranks waited(.|\n)*this rank has no data"):
        ranks.run_ranks(in_turn, 2, timeout=60.0)


def sums(rank: int, world: int) -> float:
    x = torch.ones(1)
    dist.all_reduce(x)
    return float(x)


def test_ranks_return_their_results() -> None:
    assert ranks.run_ranks(sums, 2) == [2.0, 2.0]
    both = ranks.run_ranks(lambda rank, world: ranks.run_scenarios(rank, world, {"both fail": both_fail}), 2)
    with pytest.raises(AssertionError, match="both fail:\n(.|\n)*rank 0 has no data(.|\n)*rank 1 has no data"):
        ranks.all_passed(both)


def _meets(rank: int, meeting: socket.socket) -> None:
    ranks.join_group(rank, 2, meeting, 60)
    dist.barrier()


def test_no_other_process_takes_the_port_before_ranks_meet() -> None:
    meeting = ranks.meeting_socket()
    with pytest.raises(OSError, match="in use"):
        socket.create_server(meeting.getsockname(), reuse_port=False)
    forked = [multiprocessing.get_context("fork").Process(target=_meets, args=(r, meeting)) for r in range(2)]
    for process in forked:
        process.start()
    meeting.close()
    for process in forked:
        process.join(ranks.PATIENCE)
    assert [process.exitcode for process in forked] == [0, 0]
