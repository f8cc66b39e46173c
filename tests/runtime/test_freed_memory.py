"""Host memory that steps have freed: kept for the next one, and given back now and then."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.runtime import freed_memory
from shardwright.runtime.freed_memory import BLOCK, FIRST, LAST, TOP, freed


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


#: A test whose heap is its own: what other tests have left on a process's heap would decide it.
GLIBC = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")


def of_a_new_process(measure: Callable[[], int]) -> int:
    """The number that a function of this file returns in a process that has done nothing else."""
    code = f"import {Path(__file__).stem} as tests; print('measured', tests.{measure.__name__}())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split("measured")[-1])


def faults_of_a_third_round() -> int:
    planned()[0](torch.ones(4, 4))
    before = 0
    for _ in range(3):
        before = faults()
        blocks = [torch.ones(6 << 20) for _ in range(8)]  # 24 MiB each: 49,152 pages
        del blocks
    return faults() - before


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@GLIBC
def test_what_a_step_frees_is_there_for_the_next() -> None:
    assert of_a_new_process(faults_of_a_third_round) < 5_000


@pytest.mark.parametrize(
    "name, value, chosen",
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072", True),
        ("MALLOC_MMAP_THRESHOLD_", "131072", True),
        ("OTHER", "1", False),
        ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.trim_threshold=1", True),
        ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0", False),
    ],
)
def test_thresholds_of_the_environment_stay(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, chosen: bool
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(freed, "_set", lambda what, value: asked.append((what, value)))
    monkeypatch.setenv(name, value)
    freed.planned(torch.device("cpu"))
    assert asked == ([] if chosen or freed._give_back is None else [(-3, BLOCK), (-1, TOP)])


def test_nothing_is_set_or_given_back_beside_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(freed, "_set", lambda what, value: asked.append(what))
    monkeypatch.setattr(freed, "_give_back", asked.append)
    freed.planned(torch.device("cuda", 0))
    for _ in range(10):
        freed.step()
    assert not asked
    freed.planned(torch.device("cpu"))
    freed.step(), freed.step()
    assert asked


def given_back_between_blocks() -> int:
    model, x = planned()
    model(x)
    blocks, between = [], []
    for _ in range(128):
        blocks.append(torch.ones(1 << 18))  # 1 MiB
        between.append(torch.ones(1 << 16))
    blocks.clear()
    kept = resident()
    model(x)
    return kept - resident()


@GLIBC
def test_what_lies_between_blocks_in_use_goes_back_to_the_system() -> None:
    assert of_a_new_process(given_back_between_blocks) > 96 << 20


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
