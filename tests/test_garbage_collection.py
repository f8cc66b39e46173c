"""Calls in a loop ask the kernel for nothing, however deep the loop stands."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import pytest

from shardwright.garbage_collection import roomy_stack

CALLS = 500


def leaf(x: int) -> int:
    return x


def faults_of_a_loop() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for i in range(CALLS):
        leaf(i)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def at_depth(n: int) -> int:
    return faults_of_a_loop() if n == 0 else at_depth(n - 1)


def most_faults() -> int:
    """Page faults of the loop, at the worst of the depths of two chunks of frames."""
    return max(at_depth(n) for n in range(400))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="this interpreter allocates each frame by itself")
def test_a_loop_at_the_end_of_a_chunk_asks_the_kernel_for_nothing() -> None:
    plain = most_faults()
    assert roomy_stack(most_faults)() < CALLS / 10
    if plain < CALLS:  # after other tests the C library may keep the memory of a chunk
        pytest.skip("this process asks the kernel for nothing without a roomy stack either")


def test_arguments_results_and_errors_pass() -> None:
    def divided(x: int, *, by: int) -> int:
        """A docstring."""
        return x // by

    ours: Callable[..., int] = roomy_stack(divided)
    assert ours(7, by=2) == 3
    assert (ours.__name__, ours.__doc__) == ("divided", "A docstring.")
    with pytest.raises(ZeroDivisionError):
        ours(7, by=0)
