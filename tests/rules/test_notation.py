"""The notation string: reading it, fitting it to shapes, and what follows from an assignment."""

import pytest
from hypothesis import given, strategies as st

from shardwright.errors import RuleError
from shardwright.layout import Digit, Layout
from shardwright.rules import Bound, bind, parse


def bound(text: str, ins: list[tuple[int, ...]], outs: list[tuple[int, ...]], **sizes: int) -> Bound:
    return bind(parse(text), ins, outs, sizes)


def names(b: Bound) -> list[str]:
    return [f.name for f in b.factors]


# -- reading ---------------------------------------------------------------------------------------------------------


def test_operands_tokens_and_marks() -> None:
    n = parse("n ci! h! w!, co ci! kh! kw!, co? -> n co h! w!")
    assert n.inputs == ((("n",), ("ci",), ("h",), ("w",)), (("co",), ("ci",), ("kh",), ("kw",)), (("co",),))
    assert n.outputs == ((("n",), ("co",), ("h",), ("w",)),)
    assert n.whole == {"ci", "h", "w", "kh", "kw"}
    assert n.optional == {2}


def test_compound_one_scalar_and_no_inputs() -> None:
    assert parse("a (b c) 1 -> (a b) c").inputs == ((("a",), ("b", "c"), ()),)
    assert parse("k, k -> ").outputs == ((),)
    assert parse(" -> a b").inputs == ()
    assert parse("k, -> k").inputs == ((("k",),), ())


def test_order_prefix() -> None:
    assert parse("m k n: k n, m k -> m n").order == ("m", "k", "n")


@pytest.mark.parametrize(
    "text, at, words",
    [
        ("a b", 0, "exactly one '->'"),
        ("a -> b -> c", 2, "exactly one '->'"),
        ("a b$ -> a", 3, "cannot read '$'"),
        ("a (b (c)) -> a", 5, "inside a compound"),
        ("a () -> a", 3, "empty or unopened"),
        ("a ) -> a", 2, "empty or unopened"),
        ("a (b -> a", 2, "not closed"),
        ("a a -> a", 2, "'a' stands twice"),
        ("(...) a -> a", 1, "'...' inside a compound"),
        ("a -> a?", 5, "never optional"),
        ("z: a -> a", 0, "order names 'z'"),
        ("ab b: ab -> ab", 3, "order names 'b'"),
        ("a! b: a b -> a", 0, "'a!' is not a factor name"),
        ("a -> b: a", 6, "stands before the inputs"),
    ],
)
def test_errors_point_at_the_place(text: str, at: int, words: str) -> None:
    with pytest.raises(RuleError) as error:
        parse(text)
    message, shown, caret = error.value.message.split("\n")
    assert words in message
    assert shown == f"  {text}"
    assert caret == "  " + " " * at + "^"


def test_reading_is_memoised() -> None:
    assert parse("a b -> b a") is parse("a b -> b a")


# -- fitting ---------------------------------------------------------------------------------------------------------


def test_ellipsis_is_aligned_on_the_right_and_broadcasts() -> None:
    b = bound("..., ... -> ...", [(4, 1, 3), (5, 3)], [(4, 5, 3)])
    assert names(b) == ["...0", "...1", "...2"]
    assert [f.size for f in b.factors] == [4, 5, 3]
    assert b.inputs == (((0,), (), (2,)), ((1,), (2,)))
    assert b.outputs == (((0,), (1,), (2,)),)


def test_ellipsis_may_stand_for_no_dim() -> None:
    assert bound("... k, n k -> ... n", [(6,), (4, 6)], [(4,)]).inputs[0] == ((0,),)


def test_factors_stand_in_the_order_in_which_they_are_named() -> None:
    assert names(bound("m k, k n -> m n", [(2, 3), (3, 4)], [(2, 4)])) == ["m", "k", "n"]
    assert names(bound("m k n: k m, k n -> m n", [(3, 2), (3, 4)], [(2, 4)])) == ["m", "k", "n"]
    # The broadcast dims stand together, where they are first named: also those that the first operand lacks.
    assert names(bound("... k, ... n -> ... k n", [(3, 5), (2, 3, 7)], [(2, 3, 5, 7)])) == ["...0", "...1", "k", "n"]


def test_size_one_dims_broadcast_against_named_factors() -> None:
    b = bound("m n, m n -> m n", [(4, 1), (4, 8)], [(4, 8)])
    assert b.inputs == (((0,), ()), ((0,), (1,)))


def test_compound_sizes() -> None:
    b = bound("a (b c) -> (a b) c", [(4, 8)], [(8, 4)], b=2, c=4)
    assert {f.name: f.size for f in b.factors} == {"a": 4, "b": 2, "c": 4}
    b = bound("a (b c) -> (a b) c", [(4, 8)], [(4, 8)], b=1, c=8)
    assert b.inputs == (((0,), (2,)),)  # a factor of size 1 is none


@pytest.mark.parametrize(
    "text, ins, outs, words",
    [
        ("a -> a", [(2,), (2,)], [(2,)], "describes 1 input, the operator has 2"),
        ("a -> a, a", [(2,)], [(2,)], "describes 2 outputs, the operator has 1"),
        ("a b -> a", [(2,)], [(2,)], "2 dims where the operator has (2,)"),
        ("... a b -> a", [(2,)], [(2,)], "at least 2 dims, not (2,)"),
        ("a, a -> a", [(2,), (3,)], [(2,)], "'a' has sizes 2 and 3"),
    ],
)
def test_what_does_not_fit_says_so_with_the_shapes(text, ins, outs, words) -> None:
    with pytest.raises(RuleError) as error:
        bound(text, ins, outs)
    assert words in str(error.value) and str(tuple(ins)) in str(error.value)


def test_a_compound_that_does_not_make_the_dim() -> None:
    with pytest.raises(RuleError, match="makes 6, the tensor has 8"):
        bound("(a b) -> a b", [(8,)], [(2, 3)])


def test_whole_ellipsis() -> None:
    assert not any(f.splittable for f in bound("...! -> ", [(4, 8)], [()]).factors)


# -- what follows ----------------------------------------------------------------------------------------------------


def test_layouts_partial_sums_and_gradient_sums_of_a_matmul() -> None:
    b = bound("m k, k n -> m n", [(32, 784), (784, 512)], [(32, 512)])
    m, k, n = Digit(2, 4), Digit(2, 2), Digit(2, 1)
    a = b.cut_by(8, {0: (m,), 1: (k,), 2: (n,)})
    assert b.input_layout(0, a) == Layout.of(8, [[m], [k]])
    assert b.input_layout(1, a) == Layout.of(8, [[k], [n]])
    assert b.output_layout(0, a) == Layout.of(8, [[m], [n]], partial=[k])
    assert b.gradient_partial(0, a) == (n,)
    assert b.gradient_partial(1, a) == (m,)
    assert b.in_strategy(a) == ((2, 2), (2, 2))
    assert b.out_cuts(a) == ((2, 2),)


def test_a_broadcast_bias_sums_its_gradient_over_the_rows() -> None:
    b = bound("... k, n k, n? -> ... n", [(8, 6), (4, 6), (4,)], [(8, 4)])
    a = b.cut_by(4, {0: (Digit(2, 2),), 2: (Digit(2, 1),)})
    assert b.gradient_partial(2, a) == (Digit(2, 2),)


def test_reduction_of_the_open_output() -> None:
    b = bind(parse("a b -> b"), [(4, 8)], [(8,)], reduction="max")
    assert b.output_layout(0, b.cut_by(2, {0: (Digit(2, 1),)})).reduction == "max"


def test_minor_part_of_a_compound_is_cut_only_after_the_major_one() -> None:
    b = bound("a b -> (a b)", [(4, 8)], [(32,)])
    assert b.output_layout(0, b.cut_by(2, {1: (Digit(2, 1),)})) is None
    assert not b.is_consistent(b.cut_by(2, {1: (Digit(2, 1),)}))
    both = b.cut_by(8, {0: (Digit(4, 2),), 1: (Digit(2, 1),)})
    assert b.output_layout(0, both) == Layout.of(8, [[Digit(8, 1)]])


def test_consistency() -> None:
    b = bound("a b! -> a b", [(6, 4)], [(6, 4)])
    assert b.is_consistent(b.whole(4))
    assert b.is_consistent(b.cut_by(6, {0: (Digit(3, 2),)}))
    assert not b.is_consistent(b.cut_by(4, {0: (Digit(4, 1),)}))  # 6 does not divide by 4
    assert not b.is_consistent(b.cut_by(4, {1: (Digit(4, 1),)}))  # b stays whole


def test_follow_takes_the_layouts_of_some_inputs() -> None:
    b = bound("m k, k n -> m n", [(4, 8), (8, 4)], [(4, 4)])
    found = b.follow({0: Layout.of(4, [[Digit(2, 2)], [Digit(2, 1)]])})
    assert found == b.cut_by(4, {0: (Digit(2, 2),), 1: (Digit(2, 1),)})


def test_follow_refuses_what_contradicts_overlaps_or_may_not_be() -> None:
    b = bound("m k, k n -> m n", [(4, 8), (8, 4)], [(4, 4)])
    major, minor, none = [Digit(2, 2)], [Digit(2, 1)], []
    assert b.follow({0: Layout.of(4, [none, major]), 1: Layout.of(4, [minor, none])}) is None
    assert b.follow({0: Layout.of(4, [major, none]), 1: Layout.of(4, [none, major])}) is None  # m and n on one digit
    kept = bound("a! -> a", [(4,)], [(4,)])
    assert kept.follow({0: Layout.of(4, [[Digit(4, 1)]])}) is None
    broadcast = bound("..., ... -> ...", [(4,), (1,)], [(4,)])
    assert broadcast.follow({1: Layout.of(4, [[Digit(4, 1)]])}) is None


def test_follow_outputs_and_nothing() -> None:
    b = bound("m k -> k m", [(4, 8)], [(8, 4)])
    assert b.follow({0: Layout.of(4, [[Digit(4, 1)], []])}, of_outputs=True) == b.cut_by(4, {1: (Digit(4, 1),)})
    assert b.follow({}, devices=4) == b.whole(4)


def test_follow_shares_a_digit_out_to_a_compound() -> None:
    b = bound("(a b) -> a b", [(8,)], [(2, 4)])
    assert b.follow({0: Layout.of(4, [[Digit(4, 1)]])}) == b.cut_by(4, {0: (Digit(2, 2),), 1: (Digit(2, 1),)})
    assert bound("(a b) -> a b", [(6,)], [(2, 3)]).follow({0: Layout.of(3, [[Digit(3, 1)]])}) is None


@given(st.data())
def test_follow_finds_the_assignment_that_made_the_layouts(data: st.DataObject) -> None:
    b = bound("... m k, ... k n -> ... m n", [(2, 4, 8), (8, 16)], [(2, 4, 16)])
    digits = [Digit(2, 4), Digit(2, 2), Digit(2, 1)]
    owner = data.draw(st.lists(st.sampled_from([None, 0, 1, 2, 3]), min_size=3, max_size=3))
    a = b.cut_by(8, {i: tuple(d for d, o in zip(digits, owner) if o == i) for i in range(4)})
    if b.is_consistent(a):
        assert b.follow({i: b.input_layout(i, a) for i in range(2)}) == a
