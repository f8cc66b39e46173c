"""The cheapest path from one layout to another: a shortest path over the places of the rank's digits.

Source and target are cut into common *atoms*: device digits at every boundary that either of them has, tensor dims at
every prefix product of either's cuts. An atom of a dim is local, or it is carried by exactly one digit of its size. A
state gives the place of each digit that must move: an atom, R (replica) or P (a term of a reduction). The moves;
`CollectiveKind.sent` is what each of them sends:

    slice           R -> free atom
    reduce_scatter  P -> free atom
    all_reduce      P -> R
    all_to_all      atom -> free atom
    permute         atom -> taken atom
    all_gather      atom -> R

A permuting move may put a digit that is to become a replica into an atom (or a replica) that another digit leaves: so
``[A, B] -> [B, -]`` sends 4 parts of 16 and not 6 (n = 4). A replica or a term that waits for an atom which another
digit is going to leave may take the free atom at the end of that chain, so that less is left to permute: so ``[-,
A·B] -> [A·B, C]`` sends 2 parts of 16 and not 3 (n = 2).

Cost: the amount that a rank must send, then the number of collectives, then the number of permutations. A slice into
a digit's goal never hurts, so it is always taken. States may be *strided* (a minor atom is carried while a more major
one is local): no Layout can express such a state, but between two layouts it saves collectives.

Example: from [8@1, -] to [-, 8@1] the 8 ranks make one all_to_all. Each rank has 1/8 of the tensor and sends 7 of its 8
pieces: 7/64 of the tensor.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from ..layout import Digit, Digits, Layout
from .collective_kinds import CollectiveKind

__all__ = ["PARTIAL", "REPLICA", "Refinement", "SearchMove", "intermediates", "refine", "search"]

REPLICA, PARTIAL = -1, -2  # places other than an atom's number
MOST_SUBSETS = 7  # moving digits up to which every subset is tried; beyond, only the largest set of each kind

State = tuple[int, ...]


@dataclass(frozen=True)
class Refinement:
    """Two layouts in common atoms.

    Attributes:
        digits: the rank's digits, most major first; together they make up the whole rank.
        source: per digit its place in the source: an atom's number, REPLICA or PARTIAL.
        target: per digit its place in the target.
        dims: per tensor dim the numbers of its atoms, major first; the rest after them is local in both.
        sizes: per atom its size.
    """

    digits: Digits
    source: State
    target: State
    dims: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class SearchMove:
    """One step of the path: its kind, and every digit's place before and after it."""

    kind: CollectiveKind
    before: State
    after: State


@lru_cache(maxsize=1 << 16)
def _ends(digits: Digits) -> frozenset[int]:
    """The boundaries of digits."""
    return frozenset(b for digit in digits for b in (digit.stride, digit.span))


def _is_chain(numbers: Sequence[int]) -> bool:
    return all(b % a == 0 for a, b in zip(numbers, numbers[1:]))


@lru_cache(maxsize=1 << 16)
def _split(digits: Digits, boundaries: tuple[int, ...]) -> list[Digit]:
    """`digits` cut at the boundaries (ascending), in the same order. The list must not be changed."""
    out = []
    for digit in digits:
        ends = [digit.stride, *(b for b in boundaries if digit.stride < b < digit.span), digit.span]
        out += [Digit(hi // lo, lo) for lo, hi in reversed(list(zip(ends, ends[1:])))]
    return out


def _prefixes(digits: Sequence[Digit]) -> list[int]:
    out = [1]
    for digit in digits:
        out.append(out[-1] * digit.size)
    return out


@lru_cache(maxsize=1 << 16)
def refine(source: Layout, target: Layout) -> Refinement | None:
    """The common atoms of two layouts, or None where there are none (2-way here against 3-way there)."""
    layouts = (source, target)
    boundaries = {1, source.devices, *_ends(source.carried + source.partial), *_ends(target.carried + target.partial)}
    while True:
        chain = tuple(sorted(boundaries))
        if not _is_chain(chain):
            return None
        split = [[_split(d, chain) for d in layout.dims or ()] for layout in layouts]
        cuts = []  # per dim: the prefix products of both
        for dim in zip(*split):
            if not dim[0] and not dim[1]:
                cuts.append([1])
                continue
            both = sorted({p for each in dim for p in _prefixes(each)})
            if not _is_chain(both):
                return None
            cuts.append(both)
        known = len(boundaries)
        for mine in split:
            for digits_before, both in zip(mine, cuts):
                if len(digits_before) + 1 == len(both):
                    continue  # no prefixes but its own
                for digit, lo, hi in zip(digits_before, (prefixes := _prefixes(digits_before)), prefixes[1:]):
                    boundaries.update(digit.stride * (hi // p) for p in both if lo < p < hi)
        if len(boundaries) == known:
            break
    sizes: list[int] = []
    dims: list[tuple[int, ...]] = []
    for both in cuts:
        dims.append(tuple(range(len(sizes), len(sizes) + len(both) - 1)))
        sizes += [hi // lo for lo, hi in zip(both, both[1:])]
    digits = tuple(Digit(hi // lo, lo) for lo, hi in reversed(list(zip(chain, chain[1:]))))
    places = []
    for layout, carried in zip(layouts, split):
        at = {d: PARTIAL for d in _split(layout.partial, chain)}
        for atoms, ds in zip(dims, carried):
            at.update(zip(ds, atoms))
        places.append(tuple(at.get(d, REPLICA) for d in digits))
    return Refinement(digits, places[0], places[1], tuple(dims), tuple(sizes))


def intermediates(source: Layout, target: Layout) -> Iterator[Layout]:
    """Yield layouts between a source and a target without common atoms: one of the two with some digits gathered.

    The first is always possible: everything gathered except the partial digits of the target.
    """
    assert source.dims is not None and target.dims is not None
    devices, open_ = source.devices, target.partial
    yield Layout.of(devices, ((),) * len(source.dims), open_, source.reduction)
    boundaries = tuple(sorted(_ends(open_)))
    partial = _split(source.partial, boundaries)
    stays = [d for d in partial if any(d.stride % o.stride == 0 and o.span % d.span == 0 for o in open_)]
    summed = [d for d in partial if d not in stays]
    for laid, sums in ((source.dims, summed), (target.dims, [])):
        prefixes = [range(len(d) + 1) for d in laid]
        chosen = list(product(*prefixes, *[(0, 1)] * len(sums)))
        if len(chosen) > 64:  # many digits and mixed radices at once: keep planning quick
            chosen = chosen[:: len(chosen) // 64]
        for lengths in chosen:
            dims = [d[:n] for d, n in zip(laid, lengths)]
            partial_digits = [d for d, keep in zip(sums, lengths[len(dims) :]) if keep]
            yield Layout.of(devices, dims, (*stays, *partial_digits), source.reduction)


def search(refinement: Refinement) -> tuple[int, tuple[SearchMove, ...]]:
    """The cheapest moves from source to target.

    Returns:
        The amount that a rank must send, the whole tensor being ``devices ** 2`` (this makes every amount a whole
        number), and the moves in order.
    """
    sizes = tuple(d.size for d in refinement.digits)
    atoms: dict[int, int] = {REPLICA: REPLICA, PARTIAL: PARTIAL}
    for place in refinement.source + refinement.target:
        atoms.setdefault(place, len(atoms) - 2)
    sent, moves = _cheapest(
        sizes, tuple(map(atoms.__getitem__, refinement.source)), tuple(map(atoms.__getitem__, refinement.target))
    )
    named = {number: place for place, number in atoms.items()}
    return sent, tuple(
        SearchMove(kind, tuple(map(named.__getitem__, before)), tuple(map(named.__getitem__, after)))
        for kind, before, after in moves
    )


@lru_cache(maxsize=1 << 16)
def _cheapest(
    sizes: tuple[int, ...], start: State, goal: State
) -> tuple[int, tuple[tuple[CollectiveKind, State, State], ...]]:
    """The search itself.

    Atoms are numbered in order of appearance, since their dims do not matter: few searches serve many pairs of
    layouts.
    """
    moving = tuple(i for i, (a, b) in enumerate(zip(start, goal)) if a != b)
    whole = 1
    for size in sizes:
        whole *= size * size
    first = _sliced(start, goal, moving)
    cut, permute = CollectiveKind.SLICE, CollectiveKind.PERMUTE
    heap = [(0, 0, 0, 0, first)]
    came: dict[State, tuple[State, CollectiveKind, State] | None] = {first: None}
    best = {first: (0, 0, 0)}
    tick = 0
    sent, state = 0, first
    while heap:
        sent, collectives, permuting, _, state = heapq.heappop(heap)
        if state == goal:
            break
        if best[state] < (sent, collectives, permuting):
            continue
        local = whole
        for place, size in zip(state, sizes):
            if place >= 0:
                local //= size
        for kind, n, middle in _moves(state, goal, sizes, moving):
            after = _sliced(middle, goal, moving)
            price = (sent + kind.sent(n, local), collectives + (kind is not cut), permuting + (kind is permute))
            if after not in best or price < best[after]:
                best[after] = price
                came[after] = (state, kind, middle)
                tick += 1  # among equal prices the move generated first wins: the same path every time
                heapq.heappush(heap, (*price, tick, after))
    assert state == goal, "a state without a way on"
    path: list[SearchMove] = []
    while (step := came[state]) is not None:
        before, kind, middle = step
        path += [SearchMove(cut, middle, state), SearchMove(kind, before, middle)]
        state = before
    path.append(SearchMove(cut, start, state))
    moves: list[SearchMove] = []
    for move in reversed(path):
        if moves and moves[-1].kind is move.kind is cut:
            move = SearchMove(cut, moves.pop().before, move.after)
        if move.before != move.after:
            moves.append(move)
    return sent, tuple((move.kind, move.before, move.after) for move in moves)


def _sliced(state: State, goal: State, moving: tuple[int, ...]) -> State:
    """The state after every slice that is possible now."""
    taken = {state[i] for i in moving}
    if all(state[i] != REPLICA or goal[i] < 0 or goal[i] in taken for i in moving):
        return state
    out = list(state)
    for i in moving:
        if state[i] == REPLICA and goal[i] >= 0 and goal[i] not in taken:
            out[i] = goal[i]
    return tuple(out)


def _moves(
    state: State, goal: State, sizes: Sequence[int], moving: tuple[int, ...]
) -> Iterator[tuple[CollectiveKind, int, State]]:
    """Yield (kind, number of ranks in a group, the state after) of every move; reductions first."""
    taken = {state[i]: i for i in moving if state[i] >= 0}
    reduce: list[int] = []
    scatter: list[int] = []
    gather, exchange = [], []
    for i in moving:
        current, target = state[i], goal[i]
        if current == target:
            continue
        if current == PARTIAL:
            (reduce if target == REPLICA or target in taken else scatter).append(i)
        elif target == REPLICA:
            gather.append(i)
        else:
            exchange.append(i)
    every = len(moving) <= MOST_SUBSETS
    for chosen, n in _subsets(reduce, sizes, every):
        yield CollectiveKind.ALL_REDUCE, n, _placed(state, {i: REPLICA for i in chosen})
    for chosen, n in _subsets(scatter, sizes, every):
        yield CollectiveKind.REDUCE_SCATTER, n, _placed(state, {i: goal[i] for i in chosen})
    for chosen, n in _subsets(gather, sizes, every):
        yield CollectiveKind.ALL_GATHER, n, _placed(state, {i: REPLICA for i in chosen})
    sets = [exchange]
    if (
        not every
    ):  # a replica that takes part needs a digit that becomes a replica; without replicas a way always exists
        sets.append([i for i in exchange if state[i] != REPLICA])
    for items in sets:
        for chosen, n in _subsets(items, sizes, every):
            places = {i: goal[i] for i in chosen}
            permutes = _displace(places, state, goal, sizes, taken)
            if permutes is not None:
                yield CollectiveKind.PERMUTE if permutes else CollectiveKind.ALL_TO_ALL, n, _placed(state, places)
    if every:
        for i in moving:
            if state[i] < 0 <= goal[i] and (place := _chain_end(goal[i], goal, taken)) is not None:
                kind = CollectiveKind.SLICE if state[i] == REPLICA else CollectiveKind.REDUCE_SCATTER
                yield kind, sizes[i], _placed(state, {i: place})


def _chain_end(place: int, goal: State, taken: dict[int, int]) -> int | None:
    """The free atom at the end of the chain of digits that must leave `place`; None without one."""
    end = place
    while end in taken:
        end = goal[taken[end]]
    return end if 0 <= end != place else None


def _subsets(items: Sequence[int], sizes: Sequence[int], every: bool) -> Iterator[tuple[tuple[int, ...], int]]:
    """Non-empty subsets, largest first, each with the number of ranks in its group."""
    masks = range((1 << len(items)) - 1, 0, -1) if every else [(1 << len(items)) - 1] if items else ()
    for mask in masks:
        chosen = tuple(item for k, item in enumerate(items) if mask >> k & 1)
        n = 1
        for i in chosen:
            n *= sizes[i]
        yield chosen, n


def _displace(
    places: dict[int, int], state: State, goal: State, sizes: Sequence[int], taken: dict[int, int]
) -> bool | None:
    """Add to `places` a place for each digit that an all_to_all drives out of its atom.

    A place of its size exists: each digit that takes an atom leaves a place of the same size.

    Returns:
        True where the all_to_all permutes, False where it does not; None where it is impossible: a digit driven out
        has an atom as its own goal (then it belongs into the set), or a replica's place would stay empty.
    """
    movers = tuple(places)
    entered = set(places.values())
    occupants = [taken[place] for place in entered if place in taken]
    free_places = [state[i] for i in movers if state[i] not in entered]  # REPLICA stands once for each replica
    width = [sizes[i] for i in movers if state[i] not in entered]
    for i in sorted(i for i in occupants if i not in places):
        if goal[i] != REPLICA:
            return None
        free = [k for k, size in enumerate(width) if size == sizes[i]]
        k = min(free, key=lambda k: (free_places[k] != REPLICA, k))  # prefers a replica's place, its own goal
        places[i] = free_places.pop(k)
        width.pop(k)
    return None if REPLICA in free_places else bool(occupants)


def _placed(state: State, places: dict[int, int]) -> State:
    out = list(state)
    for i, place in places.items():
        out[i] = place
    return tuple(out)
