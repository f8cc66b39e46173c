"""Tables by the identity of their keys: a key lives as long as its entry."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from shardwright.identity_tables import IdentityCache, IdentityMap, IdentitySet, numbered


def test_equal_arrays_are_different_keys() -> None:
    a, b = np.zeros(2), np.zeros(2)
    table = IdentityMap([(a, "a"), (b, "b")])
    assert table[a] == "a" and table[b] == "b" and table.get(np.zeros(2)) is None
    assert len(IdentitySet([a, b, a])) == 2 and np.zeros(2) not in IdentitySet([a, b])
    assert numbered([a, b, a]) == [0, 1, 0]


def test_a_map_has_the_entries_of_a_dict() -> None:
    a, b = np.zeros(2), np.zeros(2)
    table = IdentityMap([(a, "a")])
    assert table.setdefault(a, "x") == "a" and table.setdefault(b, "b") == "b"
    assert [(key is a, value) for key, value in table.items()] == [(True, "a"), (False, "b")]
    assert [*table.values()] == ["a", "b"] and len(table.values()) == len(table.items()) == 2
    table.clear()
    assert [*table.items()] == [*table.values()] == []


def test_a_key_lives_as_long_as_its_entry() -> None:
    """Else a later object gets the number of a dead key, and its entry with the number."""
    cache, table, members = IdentityCache(), IdentityMap[np.ndarray, int](), IdentitySet[np.ndarray]()
    watched = []
    for _ in range(3):
        array = np.zeros(4)
        watched.append(weakref.ref(array))
        cache.once("sum", (array,), lambda: 0)
    for _ in range(3):
        array = np.zeros(4)
        watched.append(weakref.ref(array))
        table[array] = 0
    for _ in range(3):
        array = np.zeros(4)
        watched.append(weakref.ref(array))
        members.add(array)
    del array
    gc.collect()
    assert all(alive() is not None for alive in watched)
    assert len(table) == len(members) == 3


def test_a_result_is_made_once_for_the_same_operation_on_the_same_objects() -> None:
    cache, a, b, made = IdentityCache(), np.ones(2), np.ones(2), []

    def make() -> int:
        made.append(1)
        return len(made)

    assert [cache.once("x", (a,), make), cache.once("x", (a,), make)] == [1, 1]
    assert [cache.once("x", (b,), make), cache.once("y", (a,), make), cache.once("x", (a, b), make)] == [2, 3, 4]
    further = IdentityCache(cache)
    assert further.once("x", (a,), make) == 1
    assert further.once("z", (a,), make) == 5 and cache.once("z", (a,), make) == 6
