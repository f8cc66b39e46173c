"""Layouts: which slice lies on which rank, and what is refused."""

import itertools
import pickle

import pytest
from hypothesis import given, settings, strategies as st

from shardwright.errors import LayoutError
from shardwright.layout import Digit, Layout, allocate, complement, digits_size, group_of, groups, merge

MATRICES = [(2, 2, 2), (2, 3), (3, 2), (2, 3, 2), (3, 4), (6, 2), (2, 4), (4, 2), (2, 2, 2, 2), (5,), (1, 4), (3, 1, 2)]


@st.composite
def named(draw):
    """A device matrix and an assignment of its axes to the dims of a tensor: (matrix, names, entries)."""
    matrix = draw(st.sampled_from(MATRICES))
    names = tuple(f"a{i}" for i in range(len(matrix)))
    dims = draw(st.integers(1, 3))
    entries: list[list[str]] = [[] for _ in range(dims)]
    for name in draw(st.permutations(names)):
        where = draw(st.integers(-1, dims - 1))
        if where >= 0:
            entries[where].append(name)
    return matrix, names, tuple(tuple(e) for e in entries)


def coordinate(matrix, rank):
    """Row-major, by division: independent of digits."""
    out = []
    for size in reversed(matrix):
        out.append(rank % size)
        rank //= size
    return out[::-1]


@given(named())
@settings(max_examples=300, deadline=None)
def test_every_element_is_on_exactly_the_ranks_that_the_layout_says(case):
    matrix, names, entries = case
    layout = Layout(matrix, names)(*entries)
    shape = tuple(2 * digits_size([layout.axis(n) for n in entry]) for entry in entries)
    for rank in range(layout.devices):
        value = dict(zip(names, coordinate(matrix, rank)))
        expected = []
        for entry in entries:
            index = 0
            for name in entry:  # the first name is the major one
                index = index * matrix[names.index(name)] + value[name]
            expected.append(slice(2 * index, 2 * index + 2))
        assert layout.slice(shape, rank) == tuple(expected)
        assert layout.local_shape(shape) == (2,) * len(shape)
    holders = {element: 0 for element in itertools.product(*map(range, shape))}
    for rank in range(layout.devices):
        for element in itertools.product(*(range(s.start, s.stop) for s in layout.slice(shape, rank))):
            holders[element] += 1
    assert set(holders.values()) == {digits_size(layout.replicas)}


@given(named())
@settings(max_examples=200, deadline=None)
def test_two_spellings_of_one_placement_are_equal_and_hash_equal(case):
    matrix, names, entries = case
    layout = Layout(matrix, names)(*entries)
    spelled = Layout.of(layout.devices, layout.dims)
    digit_by_digit = Layout.of(layout.devices, [[layout.axis(n) for n in entry] for entry in entries])
    renamed = Layout(matrix, tuple(n.upper() for n in names))(*[tuple(n.upper() for n in e) for e in entries])
    for other in (spelled, digit_by_digit, renamed, pickle.loads(pickle.dumps(layout))):
        assert other == layout and hash(other) == hash(layout)


@given(named(), named())
@settings(max_examples=300, deadline=None)
def test_layouts_are_equal_exactly_when_they_place_the_same_slices(one, two):
    a, b = Layout(one[0], one[1])(*one[2]), Layout(two[0], two[1])(*two[2])
    if a.devices == b.devices and len(a.dims) == len(b.dims):
        shape = tuple(x * y for x, y in zip(a.cuts, b.cuts))
        same = all(a.slice(shape, r) == b.slice(shape, r) for r in range(a.devices))
        assert (a == b) == same


@given(named())
@settings(max_examples=200, deadline=None)
def test_groups_partition_the_ranks(case):
    matrix, names, entries = case
    layout = Layout(matrix, names)(*entries)
    for digits in (layout.carried, layout.replicas, (layout.axis(names[0]),)):
        parts = groups(layout.devices, digits)
        assert sorted(r for g in parts for r in g) == list(range(layout.devices))
        for group in parts:
            assert len(group) == digits_size(digits) and list(group) == sorted(group)
            assert all(group_of(r, digits) == group for r in group)
            outside = complement(layout.devices, digits)
            assert len({tuple(d.value(r) for d in outside) for r in group}) == 1
    shape = tuple(2 * c for c in layout.cuts)
    for group in groups(layout.devices, layout.replicas):
        assert len({str(layout.slice(shape, r)) for r in group}) == 1


def test_one_layout_two_spellings():
    by_names = Layout((2, 2, 2), ("dp", "sp", "mp"))(("dp", "sp"), "mp")
    assert by_names == Layout((4, 2), ("rows", "columns"))("rows", "columns") == Layout.from_cuts(8, (4, 2))
    assert by_names != Layout((2, 2, 2), ("dp", "sp", "mp"))(("sp", "dp"), "mp")


def test_the_first_name_of_a_tuple_is_the_major_one():
    layout = Layout((2, 2, 2), ("dp", "sp", "mp"))("mp", ("sp", "dp"))
    first = {rank: layout.slice((2, 4), rank) for rank in range(8)}
    top = {columns.start: r for r, (rows, columns) in first.items() if rows.start == 0}
    where = [top[c] for c in range(4)]
    assert where == [0, 4, 2, 6]


def test_matmul_example_rank_5():
    """matmul((2, 4), (4, 1)) of 32x784 by 784x512 on 8 devices: factors m, k, n in this order."""
    m, k, n = allocate(8, (2, 4, 1))
    x, w = Layout.of(8, (m, k)), Layout.of(8, (k, n))
    assert x.slice((32, 784), 5) == (slice(16, 32), slice(196, 392))
    assert w.slice((784, 512), 5) == (slice(196, 392), slice(0, 512))
    partial = Layout.of(8, (m, n), k)
    assert partial.groups(partial.partial) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert partial.without_partial().replicas == k and partial.without_partial().with_partial(k) == partial


def test_a_tuple_strategy_repeats_on_the_right():
    layout = Layout.from_cuts(8, (4, 1))
    assert [layout.position(0, r) for r in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert layout.replicas == (Digit(2, 1),)
    three = Layout.from_cuts(6, (3,))
    assert [three.position(0, r) for r in range(6)] == [0, 0, 1, 1, 2, 2]


def test_mixed_radices():
    two, three = Layout.from_cuts(12, (2, 1)), Layout.of(12, ((Digit(3, 1),), ()))
    assert [two.position(0, r) for r in range(12)] == [0] * 6 + [1] * 6
    assert [three.position(0, r) for r in range(12)] == [0, 1, 2] * 4
    assert merge([Digit(2, 6), Digit(1, 6), Digit(2, 3), Digit(3, 1)]) == (Digit(12, 1),)
    assert complement(12, (Digit(2, 2),)) == (Digit(3, 4), Digit(2, 1))


def test_table_names_every_rank():
    table = Layout((2, 2), ("dp", "mp"))("dp", "mp").table((4, 4))
    assert table.splitlines()[0].split() == ["rank", "dp", "mp", "slice"]
    assert table.splitlines()[3].split() == ["2", "1", "0", "[2:4,", "0:2]"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Layout((2, 2), ("dp", "dp")),
        lambda: Layout((2, 2), ("dp",)),
        lambda: Layout((2,), ("dp", "mp")),
        lambda: Layout((), ()),
        lambda: Layout((2, 0), ("dp", "mp")),
        lambda: Layout((2, -2), ("dp", "mp")),
        lambda: Layout((2, 2.0), ("dp", "mp")),
        lambda: Layout((True, 2), ("dp", "mp")),
        lambda: Layout((2, 2), "ab"),
        lambda: Layout((2, 2), ("dp", "interleaved_parallel")),
        lambda: Layout((2, 2), ("dp", "None")),
        lambda: Layout((2, 2), ("dp", "")),
        lambda: Layout((2, 2), ("dp", "mp"))("tp", "None"),
        lambda: Layout((2, 2), ("dp", "mp"))("dp", "dp"),
        lambda: Layout((2, 2), ("dp", "mp"))(("dp", "dp"), "None"),
        lambda: Layout((2, 2), ("dp", "mp"))("dp", ("mp", "dp")),
        lambda: Layout((2, 2), ("dp", "mp")).axis("tp"),
        lambda: Layout((2, 2), ("dp", "mp")).groups("tp"),
        lambda: Layout((2, 2), ("dp", "mp")).slice((4, 4), 0),
        lambda: Layout((2, 2), ("dp", "mp"))("dp").slice((4, 4), 0),
        lambda: Layout((2, 2), ("dp", "mp"))("dp", "mp").slice((4, 4), 4),
        lambda: Layout((2, 2), ("dp", "mp"))("dp", "mp").slice((4, 4), -1),
        lambda: Layout((2, 2), ("dp", "mp"))("dp", "mp").local_shape((4, 3)),
        lambda: Layout.from_cuts(8, (3,)),
        lambda: Layout.from_cuts(8, (4, 4)),
        lambda: Layout.from_cuts(8, (0, 2)),
        lambda: Layout.from_cuts(8, (-2, 2)),
        lambda: Layout.from_cuts(8, (2.0,)),
        lambda: Layout.of(8, ((Digit(4, 1),), (Digit(2, 2),))),
        lambda: Layout.of(8, ((Digit(3, 1),),)),
        lambda: Layout.of(8, ((Digit(2, 1),),), (Digit(2, 1),)),
        lambda: Layout.from_cuts(8, (2, 2))("dp", "mp"),
    ],
)
def test_refused(make):
    with pytest.raises(LayoutError):
        make()


def test_errors_say_what_would_be_legal():
    with pytest.raises(LayoutError, match="legal"):
        Layout.from_cuts(8, (3,))
    with pytest.raises(LayoutError, match="'tp'.*\n.*\n.*'dp', 'mp'"):
        Layout((2, 2), ("dp", "mp"))("tp", "None")


def test_a_layout_is_immutable():
    layout = Layout.from_cuts(8, (2, 4))
    with pytest.raises(AttributeError):
        layout.devices = 4


# -- words of the tutorials ------------------------------------------------------------------------------------------


def test_none_in_a_tuple_of_names_says_nothing():
    layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
    assert layout("dp", ("sp", "None")) == layout("dp", "sp") and layout(("None", "sp", "None", "dp")).cuts == (4,)
    assert repr(layout("dp", ("sp", "None"))).endswith("('dp', 'sp')") and layout(("None",)).is_replicated
    with pytest.raises(LayoutError, match="'sp' is used twice"):
        layout("sp", ("sp", "None"))


def test_name_is_another_word_for_alias_name():
    assert Layout((2, 2), name=("a", "b")) == Layout((2, 2), ("a", "b")) == Layout((2, 2), alias_name=("a", "b"))
    with pytest.raises(LayoutError, match="two words for one thing"):
        Layout((2, 2), ("a", "b"), name=("a", "b"))


@st.composite
def orders(draw):
    """A device matrix and an order of the ranks that digits give: the factors of the number of devices, dealt to the
    axes in any order."""
    factors = draw(st.lists(st.sampled_from([2, 2, 3]), min_size=1, max_size=4))
    stride, digits = 1, []
    for factor in factors:
        digits.append(Digit(factor, stride))
        stride *= factor
    digits = draw(st.permutations(digits))
    cuts = sorted({0, len(digits), *draw(st.lists(st.integers(0, len(digits)), max_size=2))})
    axes = [digits[i:j] for i, j in itertools.pairwise(cuts)]
    ranks = [
        sum(value * digit.stride for value, digit in zip(values, digits))
        for values in itertools.product(*(range(digit.size) for digit in digits))
    ]
    return tuple(map(digits_size, axes)), tuple(f"a{i}" for i in range(len(axes))), ranks


@given(orders())
@settings(max_examples=200, deadline=None)
def test_a_rank_list_says_which_rank_is_at_each_position(case):
    matrix, names, ranks = case
    layout = Layout(matrix, names, rank_list=ranks)
    plain, shape = Layout(matrix, names)(*names), tuple(2 * size for size in matrix)
    for laid in (layout(*names), pickle.loads(pickle.dumps(layout))(*names), eval(repr(layout(*names)))):
        assert [laid.slice(shape, rank) for rank in ranks] == [plain.slice(shape, p) for p in range(layout.devices)]
    for name in names:
        mine = {tuple(sorted(ranks[p] for p in group)) for group in Layout(matrix, names).groups(name)}
        assert set(layout.groups(name)) == mine


def test_rank_lists_that_digits_cannot_express():
    expressed = 0
    for ranks in itertools.permutations(range(6)):
        try:
            layout = Layout((2, 3), ("a", "b"), ranks)
        except LayoutError as error:
            assert "cannot give the matrix (2, 3)" in str(error) and "test_layout.py" in str(error)
            continue
        expressed += 1
        assert [layout.digits("a"), layout.digits("b")] in (
            [(Digit(2, 3),), (Digit(3, 1),)],
            [(Digit(2, 1),), (Digit(3, 2),)],
        )
    assert expressed == 2
    for ranks in ([4, 5, 6, 7], [0, 1, 2], [0, 1, 1, 3], "0123", 4, [0, True, 2, 3]):
        with pytest.raises(LayoutError, match=r"not the order of the 4 devices of the matrix \(2, 2\)"):
            Layout((2, 2), ("a", "b"), rank_list=ranks)


def test_an_axis_of_several_digits():
    layout = Layout((4, 2), ("a", "b"), rank_list=(0, 2, 1, 3, 4, 6, 5, 7))
    assert layout.digits("a") == (Digit(2, 4), Digit(2, 1)) and layout.axis("b") == Digit(2, 2)
    assert layout != Layout((4, 2), ("a", "b")) and layout("a").table((4,)).splitlines()[2].split() == [
        "1", "1", "0", "[1:2]",
    ]  # fmt: skip
    with pytest.raises(LayoutError, match="several digits") as error:
        layout.axis("a")
    assert error.value.legal == "digits('a')"


@pytest.mark.parametrize(
    "make, text, legal",
    [
        (lambda: Layout((2, 4), ("dp", "")), r"axis 1 of size 4 has no name: alias_name=\('dp', ''\)", '"dp"'),
        (lambda: Layout((2, 4), ("dp", " ")), "axis 1 of size 4 has no name", '"dp"'),
        (lambda: Layout((2, 4), ()), r"device matrix \(2, 4\) has 2 axes, alias_name \(\) has 0", "('dp', 'mp')"),
        (lambda: Layout((), ()), "has no axis", "(2, 4)"),
        (lambda: Layout((2, 4), ("dp", "None")), "'None' is reserved: it means a dim that is not cut", "another name"),
    ],
)
def test_names_that_are_missing_or_reserved(make, text, legal):
    with pytest.raises(LayoutError, match=text) as error:
        make()
    assert legal in error.value.legal and error.value.source.startswith("test_layout.py")
