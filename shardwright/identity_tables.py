"""Tables whose keys are objects, told apart by identity: each table owns its keys.

An `id` belongs to an object while the object lives; then the next object may get it. A table of ids alone takes that
next object for the first one. The tables here keep each key alive as long as its entry:

    IdentityMap       object -> value, as a dict
    IdentitySet       objects, as a set
    IdentityCache     results by the objects that they are made of: the same operation on the same objects runs once
    numbered          by object, a number that it shares with itself alone

Keys need not be hashable: numpy arrays, lists, dicts. Objects that are equal are different keys: two arrays with the
same entries, two frozen dataclasses with the same fields. Tensors, modules and functions are hashed by identity as they
are, and stand in plain dicts and sets.

Example: ``numbered([a, b, a])`` is ``[0, 1, 0]``, also where a == b.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, ItemsView, Iterable, Iterator, MutableMapping, MutableSet, ValuesView
from typing import TypeVar, cast, overload

__all__ = ["IdentityCache", "IdentityMap", "IdentitySet", "numbered"]

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class IdentityMap(MutableMapping[K, V]):
    """A dict by the identity of its keys, in the order in which they came.

    Args:
        entries: (key, value) of each.
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: Iterable[tuple[K, V]] = ()) -> None:
        self._entries: dict[int, tuple[K, V]]
        if isinstance(entries, _Items):
            self._entries = dict(entries._mapping._entries)
        else:
            self._entries = {id(key): (key, value) for key, value in entries}

    def __getitem__(self, key: K) -> V:
        found = self._entries.get(id(key))
        if found is None:
            raise KeyError(key)
        return found[1]

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: V) -> V: ...
    @overload
    def get(self, key: K, default: T) -> V | T: ...
    def get(self, key: K, default: object = None) -> object:
        """The value of a key, or the default."""
        found = self._entries.get(id(key))
        return default if found is None else found[1]

    def __setitem__(self, key: K, value: V) -> None:
        self._entries[id(key)] = key, value

    def __delitem__(self, key: K) -> None:
        del self._entries[id(key)]

    def items(self) -> ItemsView[K, V]:
        """The entries, which are iterated without a look-up of each."""
        return _Items(self)

    def values(self) -> ValuesView[V]:
        """The values, likewise."""
        return _Values(self)

    def setdefault(self, key: K, default: V) -> V:
        """The value of a key; the default, which becomes its value, where it has none."""
        return self._entries.setdefault(id(key), (key, default))[1]

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()

    def __contains__(self, key: object) -> bool:
        return id(key) in self._entries

    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)


class _Items(ItemsView[K, V]):
    _mapping: IdentityMap[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return iter(self._mapping._entries.values())


class _Values(ValuesView[V]):
    _mapping: IdentityMap[object, V]

    def __iter__(self) -> Iterator[V]:
        return (value for _, value in self._mapping._entries.values())


class IdentitySet(MutableSet[K]):
    """A set by the identity of its members, in the order in which they came.

    Args:
        members: the first members.
    """

    __slots__ = ("_members",)

    def __init__(self, members: Iterable[K] = ()) -> None:
        self._members: dict[int, K]
        if isinstance(members, IdentitySet):
            self._members = dict(members._members)
        else:
            self._members = {id(member): member for member in members}

    def add(self, value: K) -> None:
        """Add a member."""
        self._members[id(value)] = value

    def update(self, members: Iterable[K]) -> None:
        """Add several members."""
        self._members.update((id(member), member) for member in members)

    def discard(self, value: K) -> None:
        """Remove a member, if it is one."""
        self._members.pop(id(value), None)

    def __contains__(self, value: object) -> bool:
        return id(value) in self._members

    def __iter__(self) -> Iterator[K]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)


class IdentityCache:
    """Results by the objects that they are made of. The objects live as long as the cache.

    Args:
        known: a cache whose results this one has too.
    """

    __slots__ = ("_made",)

    def __init__(self, known: IdentityCache | None = None) -> None:
        self._made: dict[tuple[Hashable, ...], tuple[object, tuple[object, ...]]]
        self._made = {} if known is None else dict(known._made)

    def once(self, operation: Hashable, objects: tuple[object, ...], make: Callable[[], T]) -> T:
        """The result of an operation on objects, computed at the first call.

        Args:
            operation: the operation, and everything besides the objects that its result depends on.
            objects: the objects, each known by its identity.
            make: computes the result.
        """
        key = (operation, *map(id, objects))
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make(), objects
        return cast(T, found[0])


def numbered(objects: Iterable[object]) -> list[int]:
    """By object, a number that it shares with itself alone: 0 for the first, 1 for the next other one, …"""
    numbers: dict[int, int] = {}
    alive = list(objects)  # until the end, so that no two share an id
    return [numbers.setdefault(id(each), len(numbers)) for each in alive]
