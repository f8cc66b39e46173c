"""Host memory that steps have freed: kept for the next one, and given back now and then."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.runtime import freed as freed_memory
from shardwright.runtime.freed import FIRST, LAST, freed


def planned() -> tuple[sw.AutoParallel, torch.Tensor]:
    sw.init(devices=2)
    return sw.AutoParallel(nn.Linear(4, 4), parallel_mode="data_parallel"), torch.ones(4, 4)


def test_memory_is_given_back_after_the_first_step_and_then_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [100.0], []
    monkeypatch.setattr(freed_memory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(freed, "_give_back", lambda pad: given.append(now[0]))
    model, x = planned()
    model(x)
    assert given == []
    model(x)
    assert given == [100.0]
    for _ in range(400):
        now[0] += 0.25
        model(x)
    pauses = [b - a for a, b in zip(given, given[1:])]
    assert pauses[:5] == [FIRST[0] * 2**k for k in range(5)]
    assert set(pauses[5:]) == {LAST[0]}
    given.clear()
    for _ in range(64):  # long steps
        now[0] += 100.0
        model(x)
    assert [b - a for a, b in zip(given, given[1:])] == [100.0 * LAST[1]] * 3
    model(x)
    given.clear()
    model(torch.ones(8, 4))  # another program is planned: it begins anew
    model(torch.ones(8, 4))
    assert given == [now[0]]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_what_lies_between_blocks_in_use_goes_back_to_the_system() -> None:
    model, x = planned()
    model(x)
    blocks, between = [], []
    for _ in range(128):
        blocks.append(torch.ones(1 << 18))  # 1 MiB
        between.append(torch.ones(1 << 16))
    blocks.clear()
    kept = resident()
    model(x)
    assert kept - resident() > 96 << 20


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
