"""Conversions: what they compute, what they cost, what is refused."""

import heapq
import itertools
import math
import pickle
from collections.abc import Iterator
from fractions import Fraction
from operator import le

import pytest
import torch
from hypothesis import given, settings, strategies as st

from shardwright.errors import LayoutError
from shardwright.layout import Digit, Layout, digits_size, groups
from shardwright.redistribution import redistribution, redistribution_search, through, transpose
from shardwright.runtime.local import shards as shards_module
from shardwright.runtime.local.shards import ReplicasDiffer, assemble, convert_shards as convert_in_one_memory, scatter

DEVICES = (4, 6, 8, 12, 16)


def convert_shards(found, shards):
    """Step by step, as processes do it; and the shorter way that one memory allows gives the same bits."""
    stepwise = convert_in_one_memory(found, shards, stepwise=True)
    for one, other in zip(stepwise, convert_in_one_memory(found, shards), strict=True):
        assert torch.equal(one, other)
    return stepwise


def draw_layout(draw, devices, dims, partial, reduction="sum"):
    """A random layout: the device count in random factors, each on a random dim, replicated or partial."""
    digits, stride = [], devices
    while stride > 1:
        size = draw(st.sampled_from([d for d in range(2, stride + 1) if stride % d == 0]))
        stride //= size
        digits.append(Digit(size, stride))
    places = [[] for _ in range(dims)]
    open_ = []
    for digit in draw(st.permutations(digits)):
        where = draw(st.integers(-2 if partial else -1, dims - 1))
        if where != -1:
            (open_ if where == -2 else places[where]).append(digit)
    return Layout.of(devices, places, open_, reduction)


@st.composite
def pairs(draw, partial=True, leave_open=False):
    """(source, target, a shape that both divide)."""
    devices, dims = draw(st.sampled_from(DEVICES)), draw(st.integers(1, 3))
    reduction = draw(st.sampled_from(("sum", "max", "min"))) if partial else "sum"
    source = draw_layout(draw, devices, dims, partial, reduction)
    target = draw_layout(draw, devices, dims, False)
    shape = tuple(math.lcm(a, b) * draw(st.integers(1, 2)) for a, b in zip(source.cuts, target.cuts))
    return source, target, shape


def make_shards(layout, shape, seed):
    """Random whole numbers as a layout has them (replicas equal, terms not), and the whole tensor, rank by rank."""
    generator = torch.Generator().manual_seed(seed)
    local = layout.local_shape(shape)
    shards = [torch.randint(-99, 100, local, generator=generator).double() for _ in range(layout.devices)]
    for group in groups(layout.devices, layout.replicas):
        for rank in group:
            shards[rank] = shards[group[0]]
    return shards, whole_of(shards, layout, shape)


def whole_of(shards, layout, shape):
    """The whole tensor, one element range after the other: shares no code with what is tested."""
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[layout.reduction]
    whole, seen = torch.full(shape, math.nan, dtype=torch.float64), {}
    for rank, shard in enumerate(shards):
        where, term = layout.slice(shape, rank), tuple(d.value(rank) for d in layout.partial)
        terms = seen.setdefault(str(where), {})
        if term not in terms:
            whole[where] = combine(whole[where], shard) if terms else shard
            terms[term] = shard
    return whole


def assert_lies(shards, whole, layout):
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, whole[layout.slice(whole.shape, rank)]), f"rank {rank} of {layout}"


@given(pairs(), st.integers(0, 99), st.sampled_from((0, shards_module.STACK_BYTES)))
@settings(max_examples=500, deadline=None)
def test_converting_is_assembling_and_slicing_anew(pair, seed, stack_bytes):
    source, target, shape = pair
    shards, whole = make_shards(source, shape, seed)
    before = [s.clone() for s in shards]
    found = redistribution(source, target)
    limit, shards_module.STACK_BYTES = shards_module.STACK_BYTES, stack_bytes  # both ways of the executor
    try:
        converted = convert_shards(found, shards)
    finally:
        shards_module.STACK_BYTES = limit
    assert_lies(converted, whole, target)
    assert torch.equal(assemble(shards, source, check=True), whole)
    assert torch.equal(assemble(converted, target, check=True), whole)
    assert_lies(scatter(whole, target), whole, target)
    assert torch.equal(assemble(scatter(whole, source), source), whole)
    assert all(torch.equal(a, b) for a, b in zip(before, shards)), "an input was written to"


@given(pairs(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_part_of_the_reduction_may_stay_open(pair, data):
    source, target, shape = pair
    stays = tuple(d for d in source.partial if data.draw(st.booleans()))
    if any(d.stride < s.span and s.stride < d.span for d in target.carried for s in stays):
        target = Layout.replicated(source.devices, len(shape))
    try:
        target = target.with_partial(stays, source.reduction)
    except LayoutError:  # mixed radices: digits that do not fit beside one another
        target = Layout.of(source.devices, ((),) * len(shape), stays, source.reduction)
    shards, whole = make_shards(source, shape, 1)
    converted = convert_shards(redistribution(source, target), shards)
    assert torch.equal(whole_of(converted, target, shape), whole)
    for group in groups(target.devices, target.replicas):
        assert all(torch.equal(converted[r], converted[group[0]]) for r in group)


@given(pairs(partial=False), st.data())
@settings(max_examples=200, deadline=None)
def test_transpose_is_the_adjoint(pair, data):
    """<A x, y> == <x, A' y>: terms are summed; a replica is read by whichever rank, so its gradients are summed."""
    source, target, shape = pair
    open_ = tuple(d for d in source.replicas if data.draw(st.booleans()))
    source = source.with_partial(open_)
    partial = tuple(d for d in target.replicas if data.draw(st.booleans()))
    forward = redistribution(source, target)
    backward = transpose(forward, partial)
    assert transpose(forward, partial) is backward
    assert backward.source == target.with_partial(partial) and backward.target == source.without_partial()

    x, _ = make_shards(source, shape, 1)
    y, _ = make_shards(target.with_partial(partial), shape, 2)
    leaves = {}
    for shard in x:  # replicas are one leaf each: what any of them contributes adds up
        leaves.setdefault(id(shard), shard.clone().requires_grad_())
    forwarded = convert_shards(forward, [leaves[id(shard)] for shard in x])
    terms = {}
    for rank in range(len(y)):  # a slice's gradient: one of its replicas, all of its terms
        terms.setdefault((str(target.slice(shape, rank)), tuple(d.value(rank) for d in partial)), rank)
    sum((forwarded[r] * y[r]).sum() for r in terms.values()).backward()
    for rank, gradient in enumerate(convert_shards(backward, y)):
        reached = leaves[id(x[rank])].grad
        assert torch.equal(gradient, reached if reached is not None else torch.zeros_like(gradient))


def gather_everything(source, target):
    """The fraction of the whole that a rank sends where everything is completed, gathered, and sliced anew."""
    n, cuts = digits_size(source.partial), math.prod(source.cuts)
    return Fraction(2 * (n - 1), n * cuts) + Fraction(cuts - 1, cuts)


@given(pairs())
@settings(max_examples=500, deadline=None)
def test_never_more_than_gathering_everything(pair):
    source, target, shape = pair
    found = redistribution(source, target)
    assert found.sent <= gather_everything(source, target)
    assert found.is_identity == (source == target) == (not found.steps)
    numel, total = math.prod(source.local_shape(shape)), 0
    shapes = found.local_shapes(source.local_shape(shape))
    for step, local in zip(found.steps, shapes):
        total += step.sent(math.prod(local) * source.devices**2)  # so that nothing is rounded
    assert total == found.sent * math.prod(shape) * source.devices**2
    assert shapes[-1] == target.local_shape(shape) and math.prod(shapes[0]) == numel


def ordinary_steps(layout):
    """Every textbook step from a layout of 8 devices to another, one digit or two at a time: (sent, layout)."""
    local = Fraction(1, math.prod(layout.cuts))
    binary = [
        [Digit(2, stride) for d in digits for stride in (4, 2, 1) if d.stride <= stride < d.span]
        for digits in (*layout.dims, layout.partial, layout.replicas)
    ]
    dims, partial, replicas = binary[:-2], binary[-2], binary[-1]

    def to(new, open_):
        return Layout.of(8, new, open_)

    def put(dims, dim, digits):
        return [d + list(digits) if k == dim else d for k, d in enumerate(dims)]

    for n in (1, 2, 3):
        for digits in itertools.permutations(partial, n):
            rest = [d for d in partial if d not in digits]
            yield 2 * (2**n - 1) * local / 2**n, to(dims, rest)
            for k in range(len(dims)):
                yield (2**n - 1) * local / 2**n, to(put(dims, k, digits), rest)
        for k, carried in enumerate(dims):
            if len(carried) >= n:
                short = [d[:-n] if j == k else d for j, d in enumerate(dims)]
                yield (2**n - 1) * local, to(short, partial)
                for j in range(len(dims)):
                    if j != k:
                        yield (2**n - 1) * local / 2**n, to(put(short, j, carried[-n:]), partial)
    for digit in replicas:
        for k in range(len(dims)):
            yield Fraction(0), to(put(dims, k, [digit]), partial)


def test_no_sequence_of_ordinary_steps_is_cheaper():
    """Against a shortest path among Layouts alone, which shares nothing with ours."""
    everywhere = {}
    start = Layout.of(8, ((), ()), [Digit(8, 1)])
    todo = [start]
    while todo:
        layout = todo.pop()
        if layout not in everywhere:
            everywhere[layout] = list(ordinary_steps(layout))
            todo += [after for _, after in everywhere[layout]]
    assert len(everywhere) == 92
    tick = itertools.count()
    for source in everywhere:
        shortest = {}
        for target in everywhere:
            if target.partial:
                continue
            # What neither of the two cuts that often may not divide: a path for all shapes cannot cut it either.
            most = tuple(map(max, source.cuts, target.cuts))
            if most not in shortest:
                best, heap = {}, [(Fraction(0), next(tick), source)]
                while heap:
                    sent, _, layout = heapq.heappop(heap)
                    if layout not in best:
                        best[layout] = sent
                        for cost, after in everywhere[layout]:
                            if after not in best and all(map(le, after.cuts, most)):
                                heapq.heappush(heap, (sent + cost, next(tick), after))
                shortest[most] = best
            found, sent = redistribution(source, target), shortest[most][target]
            assert found.sent <= sent, f"{found}: {found.sent}, but {sent} suffices"


def kinds(source, target):
    return [s.kind for s in redistribution(source, target).steps]


@pytest.mark.parametrize("n", [2, 3, 4, 8, 12])
def test_textbook_pairs_are_one_step(n):
    whole, rows, columns = Layout.replicated(n, 2), Layout.from_cuts(n, (n, 1)), Layout.from_cuts(n, (1, n))
    terms = whole.with_partial((Digit(n, 1),))
    for source, target, kind, sent in (
        (whole, rows, "slice", 0),
        (rows, whole, "all_gather", Fraction(n - 1, n)),
        (rows, columns, "all_to_all", Fraction(n - 1, n * n)),
        (terms, rows, "reduce_scatter", Fraction(n - 1, n)),
        (terms, whole, "all_reduce", Fraction(2 * (n - 1), n)),
    ):
        found = redistribution(source, target)
        assert [s.kind for s in found.steps] == [kind] and found.sent == sent
        assert len(found.collectives) == (kind != "slice")
        assert found.steps[0].digits == (Digit(n, 1),) and found.steps[0].reduces == (source is terms)


def test_digits_that_travel_together_are_one_collective():
    digits = [Digit(2, 4), Digit(2, 2), Digit(2, 1)]
    scattered = Layout.of(8, ([digits[0]], [digits[2]], [digits[1]]))
    found = redistribution(scattered, Layout.replicated(8, 3))
    assert kinds(scattered, Layout.replicated(8, 3)) == ["all_gather"] and found.steps[0].digits == (Digit(8, 1),)
    terms = Layout.of(8, ([digits[1]], ()), [digits[0], digits[2]])
    assert kinds(terms, terms.without_partial()) == ["all_reduce"]
    assert kinds(terms, Layout.of(8, ([digits[1], digits[0]], [digits[2]]))) == ["reduce_scatter"]
    rows, columns = Layout.of(8, (digits, ())), Layout.of(8, ((), [digits[1], digits[2], digits[0]]))
    assert kinds(rows, columns) == ["all_to_all"]


def test_slicing_comes_first_and_gathering_last():
    source = Layout.of(8, ([Digit(2, 4)], ()))
    target = Layout.of(8, ((), [Digit(4, 1)]))
    assert kinds(source, target) == ["slice", "all_gather"]
    terms = Layout.of(8, ([Digit(2, 4)], ()), [Digit(2, 2)])
    assert kinds(terms, Layout.of(8, ((), [Digit(2, 2), Digit(2, 1)]))) == ["slice", "reduce_scatter", "all_gather"]


def test_a_strided_state_saves_a_gather():
    """The digit becomes the minor one before the major one is sliced: no Layout says that, and nothing is gathered."""
    found = redistribution(Layout.of(4, ([Digit(2, 2)], ())), Layout.of(4, ([Digit(2, 1), Digit(2, 2)], ())))
    assert [s.kind for s in found.steps] == ["all_to_all", "slice"] and found.sent == Fraction(1, 4)


def test_a_digit_waits_where_another_is_going():
    a, b, c = Digit(2, 1), Digit(2, 2), Digit(2, 4)
    waits = redistribution(Layout.of(8, ((), [a, b])), Layout.of(8, ([a, b], [c])))
    assert [s.kind for s in waits.steps] == ["slice", "all_to_all"] and waits.sent == Fraction(2, 16)
    a, c = Digit(4, 16), Digit(4, 1)
    waits = redistribution(Layout.of(64, ([a], ()), [c]), Layout.of(64, ([c], [a])))
    assert [s.kind for s in waits.steps] == ["reduce_scatter", "all_to_all"] and waits.sent == Fraction(4, 16)


def test_digits_that_change_places_are_one_exchange():
    a, b = Digit(4, 4), Digit(4, 1)
    swap = redistribution(Layout.of(16, ([a], [b])), Layout.of(16, ([b], [a])))
    assert [s.kind for s in swap.steps] == ["all_to_all"] and swap.sent == Fraction(1, 16)
    turn = redistribution(Layout.of(16, ([a],)), Layout.of(16, ([b],)))  # its replicas' digit takes over
    assert [s.kind for s in turn.steps] == ["all_to_all"] and turn.sent == Fraction(1, 4)
    leave = redistribution(Layout.of(16, ([a], [b])), Layout.of(16, ([b], ())))
    assert [s.kind for s in leave.steps] == ["all_to_all", "all_gather"] and leave.sent == Fraction(4, 16)
    two, three, other_three, other_two = Digit(2, 18), Digit(3, 6), Digit(3, 2), Digit(2, 1)
    source = Layout.of(36, ([two], [three], [other_two], [other_three]))
    mixed = redistribution(source, Layout.of(36, ([other_two], [other_three], (), ())))
    assert [s.kind for s in mixed.steps] == ["all_to_all", "all_gather"] and mixed.sent == Fraction(6, 36)
    shards, whole = make_shards(source, (2, 3, 2, 3), 0)
    assert_lies(convert_shards(mixed, shards), whole, mixed.target)


def test_mixed_radices_go_through_a_common_layout():
    two, three = Layout.from_cuts(6, (2, 1)), Layout.from_cuts(6, (3, 1))
    assert kinds(two, three) == ["all_gather", "slice"] and redistribution(two, three).sent == Fraction(1, 2)
    assert kinds(Layout.from_cuts(6, (6, 1)), Layout.from_cuts(6, (3, 2))) == ["all_to_all"]
    keeps = redistribution(Layout.of(12, ([Digit(2, 6)], [Digit(2, 3)])), Layout.of(12, ([Digit(2, 6)], [Digit(3, 2)])))
    assert keeps.sent == Fraction(1, 4)  # dim 0 stays cut while dim 1 is gathered


def test_equal_conversions_are_one_object_and_survive_pickling():
    named = Layout((2, 4), ("dp", "mp"))("dp", "mp")
    found = redistribution(named, Layout.replicated(8, 2))
    assert redistribution(Layout.from_cuts(8, (2, 4)), Layout.replicated(8, 2)) is found
    again = pickle.loads(pickle.dumps(found))
    assert again == found and hash(again) == hash(found) and again.steps == found.steps
    assert pickle.loads(pickle.dumps(found.steps[0])) == found.steps[0]
    detour = through(named, Layout.from_cuts(8, (2, 1)), Layout.replicated(8, 2))
    assert detour != found and pickle.loads(pickle.dumps(detour)) == detour  # an executor must not take it for `found`
    assert str(found) == "8: [2@4, 4@1] -> 8: [-, -]: all_gather(8@1)"


@pytest.fixture
def moves(monkeypatch) -> Iterator[list]:
    """The moves that searches of this test look at; none is known from before."""
    seen, made = [], redistribution_search._moves

    def looked_at(*given):
        for move in made(*given):
            seen.append(move)
            yield move

    monkeypatch.setattr(redistribution_search, "_moves", looked_at)
    yield seen
    forget()


def forget() -> None:
    redistribution.cache_clear()
    redistribution_search._cheapest.cache_clear()


@pytest.mark.parametrize("devices", [64, 1024, 8192])
def test_many_devices_take_few_moves(devices, moves):
    """Every power of two a digit of its own, all of them in motion."""
    forget()
    count = devices.bit_length() - 1
    digits = [Digit(2, 1 << k) for k in range(count)]
    stride = 5 if count % 5 else 3
    shuffled = [digits[k * stride % count] for k in range(count)]
    source = Layout.of(devices, (digits[::2], digits[1::4], ()), digits[3::4])
    target = Layout.of(devices, ((), shuffled[::2], shuffled[3::4]))
    found = redistribution(source, target)
    assert 0 < len(moves) <= 300  # of all subsets of ten digits there would be 9,000
    assert found.sent <= gather_everything(source, target)
    if devices == 64:
        shards, whole = make_shards(source, (64, 64, 64), 0)
        assert_lies(convert_shards(found, shards), whole, target)


@st.composite
def many_digits(draw):
    """Two layouts of 512 devices, whose nine digits are all in motion more often than not."""
    layouts = []
    for partial in (True, False):
        places, open_ = [[], [], []], []
        for k in draw(st.permutations(range(9))):
            where = draw(st.integers(-2 if partial else -1, 2))
            if where != -1:
                (open_ if where == -2 else places[where]).append(Digit(2, 1 << k))
        layouts.append(Layout.of(512, places, open_))
    return layouts


@given(many_digits())
@settings(max_examples=40, deadline=None)
def test_many_digits_find_a_way(pair):
    """Past a number of digits only the largest sets are tried; the way must still be one."""
    source, target = pair
    shape = tuple(max(a, b) for a, b in zip(source.cuts, target.cuts))
    shards, whole = make_shards(source, shape, 0)
    found = redistribution(source, target)
    assert found.sent <= gather_everything(source, target)
    assert_lies(convert_shards(found, shards), whole, target)


def test_typical_redistributions_take_few_moves(moves):
    layouts = [
        Layout.of(8, dims, partial)
        for dims, partial in (
            (((), ()), ()),
            (((Digit(8, 1),), ()), ()),
            (((), (Digit(8, 1),)), ()),
            (((Digit(2, 4),), (Digit(4, 1),)), ()),
            (((Digit(4, 2),), (Digit(2, 1),)), ()),
            (((Digit(2, 1),), (Digit(2, 4), Digit(2, 2))), ()),
            (((Digit(2, 4),), ()), (Digit(4, 1),)),
        )
    ]
    numbers = []
    for source in layouts:
        for target in layouts[:-1]:
            forget()
            moves.clear()
            redistribution(source, target)
            numbers.append(len(moves))
    assert sorted(numbers)[len(numbers) // 2] == 1 and max(numbers) <= 20


@pytest.mark.parametrize(
    "source, target",
    [
        (Layout.from_cuts(8, (2, 4)), Layout.from_cuts(4, (2, 2))),
        (Layout.from_cuts(8, (2, 4)), Layout.from_cuts(8, (2, 2, 2))),
        (Layout.from_cuts(8, (2, 1)), Layout.from_cuts(8, (2, 1)).with_partial((Digit(2, 1),))),
        (
            Layout.from_cuts(8, (2,)).with_partial((Digit(2, 1),)),
            Layout.from_cuts(8, (2,)).with_partial((Digit(2, 2),)),
        ),
        (
            Layout.from_cuts(8, (2,)).with_partial((Digit(2, 1),), "max"),
            Layout.of(8, ((Digit(2, 4),),), (Digit(2, 1),)),
        ),
        (Layout((2, 4), ("dp", "mp")), Layout.from_cuts(8, (2, 4))),
    ],
)
def test_refused(source, target):
    with pytest.raises(LayoutError):
        redistribution(source, target)


def test_a_dim_that_does_not_divide_is_refused():
    found = redistribution(Layout.from_cuts(8, (8, 1)), Layout.from_cuts(8, (1, 8)))
    with pytest.raises(LayoutError, match="dim 1"):
        convert_shards(found, [torch.zeros(2, 4)] * 8)
    with pytest.raises(LayoutError):
        found.local_shapes((2, 8, 8))


def test_other_types_zeros_and_scalars():
    gather = redistribution(Layout.from_cuts(4, (4,)), Layout.replicated(4, 1))
    flags = [torch.tensor([True, False])] * 4
    assert convert_shards(gather, flags)[3].tolist() == [True, False] * 4
    assert convert_shards(gather, [torch.zeros(0)] * 4)[0].shape == (0,)
    empty = scatter(torch.zeros(0, 4), Layout.from_cuts(4, (2, 2)))
    assert [tuple(x.shape) for x in empty] == [(0, 2)] * 4
    terms = Layout.of(4, (), (Digit(4, 1),))
    total = convert_shards(redistribution(terms, Layout.replicated(4, 0)), [torch.tensor(r) for r in range(4)])
    assert [x.item() for x in total] == [6] * 4


def test_sums_are_in_the_order_of_the_ranks():
    values = [1e8, 1.0, -1e8, 3.0]
    total = convert_shards(
        redistribution(Layout.of(4, (), (Digit(4, 1),)), Layout.replicated(4, 0)), [torch.tensor(v) for v in values]
    )
    assert total[0].item() == 3.0  # ((1e8 + 1) - 1e8) + 3 in float32


def test_replicas_that_differ_are_named():
    layout = Layout.from_cuts(4, (2,))
    shards = [torch.tensor([1.0, math.nan, math.inf]) for _ in range(2)] + [torch.ones(3), torch.ones(3)]
    assert assemble(shards, layout, check=True).shape == (6,)
    shards[3] = torch.tensor([1.0, 1.0, 1.0 + 1e-6])
    assemble(shards, layout, check=True)
    with pytest.raises(ReplicasDiffer, match="ranks 2 and 3"):
        assemble(shards, layout, check=True, tolerance=0.0)
    shards[3] = torch.tensor([1.0, 1.0, 1.1])
    with pytest.raises(ReplicasDiffer, match="ranks 2 and 3"):
        assemble(shards, layout, check=True)
    shards[3] = torch.tensor([1.0, 1.0, math.nan])
    with pytest.raises(ReplicasDiffer, match="ranks 2 and 3"):
        assemble(shards, layout, check=True)
