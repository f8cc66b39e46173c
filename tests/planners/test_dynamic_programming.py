"""The cheaper of the search's plan and the recursion's plan within one memory limit."""

from __future__ import annotations

import pytest

from shardwright.partition.local_program import Decisions, SearchResult
from shardwright.planners.dynamic_programming import _cheaper
from shardwright.planners.memory_fit import TooLittleMemoryError
from shardwright.planners.plan_search import SOME_SHARED


def plan(cost: float, bound: float | None = None, notes: tuple[str, ...] = ()) -> Decisions:
    """A plan of no operators with the report of a search for it."""
    return Decisions({}, {}, SearchResult(cost, bound, operators=3, strategies=40, notes=notes, limit=7e9))


def refusal(least: float, bound: float | None = None) -> TooLittleMemoryError:
    """The error of a search that found no plan within the limit."""
    error = TooLittleMemoryError(f"needs {least:.0f} bytes")
    error.least, error.bound = least, bound
    return error


@pytest.mark.parametrize(
    "recursion", [None, refusal(5e9), plan(2.0), plan(3.0)], ids=["none", "error", "equal", "dearer"]
)
def test_the_plan_of_the_search_stays_where_nothing_is_cheaper(
    recursion: Decisions | TooLittleMemoryError | None,
) -> None:
    searched = plan(2.0, bound=1.5, notes=("some remark",))
    assert _cheaper(searched, recursion) is searched


@pytest.mark.parametrize(
    ("bound", "reported"),
    [(1.5, 1.5), (1.8, 1.8), (1.9, None), (None, None)],
    ids=["above the bound", "at the bound", "below the bound: outside of what was searched", "no bound"],
)
def test_the_plan_of_the_recursion_is_reported_with_the_bound_of_the_search(
    bound: float | None, reported: float | None
) -> None:
    made = _cheaper(plan(2.0, bound), plan(1.8, bound=1.2)).found
    assert made is not None
    assert (made.cost, made.bound, made.limit) == (1.8, reported, 7e9)
    (note,) = made.notes
    assert note.startswith("of the recursion")


def test_a_bound_is_at_most_the_cost_of_its_plan() -> None:
    """Rounding may set the bound above the cost by less than a billionth of it."""
    made = _cheaper(plan(2.0, bound=1.8 * (1 + 1e-12)), plan(1.8)).found
    assert made is not None
    assert made.bound == 1.8


@pytest.mark.parametrize(("bound", "noted"), [(1.5, True), (1.9, False)])
def test_the_note_of_a_partial_search_goes_with_its_bound(bound: float, noted: bool) -> None:
    made = _cheaper(plan(2.0, bound, notes=("some remark", SOME_SHARED)), plan(1.8)).found
    assert made is not None
    assert (SOME_SHARED in made.notes, "some remark" in made.notes) == (noted, False)


@pytest.mark.parametrize(("bound", "reported"), [(1.5, 1.5), (1.9, None), (None, None)])
def test_the_plan_of_the_recursion_stands_alone_with_the_bound_of_the_error(
    bound: float | None, reported: float | None
) -> None:
    made = _cheaper(refusal(9e9, bound), plan(1.8)).found
    assert made is not None
    assert (made.cost, made.bound) == (1.8, reported)


@pytest.mark.parametrize(("search", "recursion"), [(9e9, 8e9), (8e9, 9e9), (8e9, None)])
def test_the_error_names_the_least_memory_of_both(search: float, recursion: float | None) -> None:
    with pytest.raises(TooLittleMemoryError, match="needs 8000000000 bytes") as caught:
        _cheaper(refusal(search), None if recursion is None else refusal(recursion))
    assert caught.value.least == 8e9
