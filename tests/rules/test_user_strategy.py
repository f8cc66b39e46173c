"""Strategies that a user gives for an operator, in normal form; or one error with the sizes and a legal choice."""

import ast
import itertools
import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import shardwright as sw
from shardwright.errors import LayoutError, ShardwrightError, StrategyError
from shardwright.layout import Digit, Digits, Layout, digits_size
from shardwright.rules import Bound, assignment_of, bind, output_layouts_of, parse, ungathered_layouts

MATMUL = "m k, k n -> m n"


def bound(text: str, ins: list[tuple[int, ...]], outs: list[tuple[int, ...]], **sizes: int) -> Bound:
    return bind(parse(text), ins, outs, sizes)


def matmul(m: int = 32, k: int = 784, n: int = 512) -> Bound:
    return bound(MATMUL, [(m, k), (k, n)], [(m, n)])


def digits(b: Bound, strategy, devices: int) -> dict[str, tuple[Digit, ...]]:
    found = assignment_of(b, strategy, devices)
    return {f.name: d for f, d in zip(b.factors, found.digits) if d}


def refused(b: Bound, strategy, devices: int, kind=StrategyError) -> ShardwrightError:
    with pytest.raises(kind) as error:
        assignment_of(b, strategy, devices)
    return error.value


# -- tuples ----------------------------------------------------------------------------------------------------------


def test_matmul_device_matrix_is_m_k_n() -> None:
    """The compiled example: rank 5 of 8 holds x[16:32, 196:392] and w[196:392, :]."""
    b = matmul()
    a = assignment_of(b, ((2, 4), (4, 1)), 8)
    assert b.input_layout(0, a).slice((32, 784), 5) == (slice(16, 32), slice(196, 392))
    assert b.input_layout(1, a).slice((784, 512), 5) == (slice(196, 392), slice(0, 512))
    out = b.output_layout(0, a)
    assert out.partial == (Digit(4, 1),) and out.groups(out.partial)[1] == (4, 5, 6, 7)


def test_contracted_factor_stands_in_the_middle_however_operands_are_stored() -> None:
    expected = {"m": (Digit(4, 2),), "k": (Digit(2, 1),)}
    einsum = bound("m k n: k m, k n -> m n", [(8, 16), (8, 4)], [(16, 4)])
    assert digits(einsum, ((2, 4), (2, 1)), 8) == expected


def test_einsum_km_kn_is_placed_like_a_matmul() -> None:
    from shardwright.graph import Op, Value
    from shardwright.rules import bound_rule

    x, w = (Value(n, s, torch.float32) for n, s in (("x", (8, 16)), ("w", (8, 4))))
    out = Value("y", (16, 4), torch.float32)
    op = Op("einsum", torch.ops.aten.einsum.default, ("km,kn->mn", [x, w]), {}, (x, w), (out,))
    assert digits(bound_rule(op), ((2, 4), (2, 1)), 8) == {"m": (Digit(4, 2),), "k": (Digit(2, 1),)}


def test_rest_is_repeated_on_the_right() -> None:
    relu = bound("... -> ...", [(32, 512)], [(32, 512)])
    assert digits(relu, ((4, 1),), 8) == {"...0": (Digit(4, 2),)}
    a = assignment_of(relu, ((4, 1),), 8)
    assert relu.input_layout(0, a).slice((32, 512), 0) == relu.input_layout(0, a).slice((32, 512), 1)


def test_any_device_count_and_any_cut() -> None:
    assert digits(matmul(6, 4, 4), ((3, 2), (2, 1)), 6) == {"m": (Digit(3, 2),), "k": (Digit(2, 1),)}
    assert digits(matmul(6, 4, 4), ((3, 1), (1, 1)), 6) == {"m": (Digit(3, 2),)}


def test_optional_inputs_may_be_left_out() -> None:
    linear = bound("... k, n k, n? -> ... n", [(8, 6), (4, 6), (4,)], [(8, 4)])
    assert assignment_of(linear, ((2, 1), (2, 1)), 4) == assignment_of(linear, ((2, 1), (2, 1), (2,)), 4)
    assert "inputs of shapes [(8, 6), (4, 6), (4,)]" in str(refused(linear, ((2, 1),), 4))


def test_scalars_and_broadcast_dims() -> None:
    added = bound("..., ..., ... -> ...", [(8, 4), (1, 4), ()], [(8, 4)])
    assert digits(added, ((4, 2), (1, 2), ()), 8) == {"...0": (Digit(4, 2),), "...1": (Digit(2, 1),)}
    assert "does not divide by 4" in str(refused(added, ((4, 2), (4, 2), ()), 8))


def test_compound_dims_are_cut_major_first() -> None:
    b = bound("(a b) -> a b", [(8,)], [(2, 4)])
    assert digits(b, ((4,),), 4) == {"a": (Digit(2, 2),), "b": (Digit(2, 1),)}
    flatten = bound("a b -> (a b)", [(4, 8)], [(32,)])
    assert digits(flatten, ((4, 2),), 8) == {"a": (Digit(4, 2),), "b": (Digit(2, 1),)}
    assert "minor part" in str(refused(flatten, ((1, 2),), 2))


# -- Layouts ---------------------------------------------------------------------------------------------------------

LAYOUT = Layout((2, 2, 2), ("dp", "sp", "mp"))


def test_layouts_say_which_digit() -> None:
    given_ = (LAYOUT("mp", ("sp", "dp")), LAYOUT(("sp", "dp"), "None"))
    assert digits(matmul(), given_, 8) == {"m": (Digit(2, 1),), "k": (Digit(2, 2), Digit(2, 4))}


def test_tuples_and_layouts_of_one_operator_mix_when_they_describe_one_assignment() -> None:
    b = matmul()
    both = assignment_of(b, (LAYOUT("dp", "sp"), LAYOUT("sp", "mp")), 8)
    assert assignment_of(b, (LAYOUT("dp", "sp"), (2, 2)), 8) == both
    assert assignment_of(b, ((2, 2), LAYOUT("sp", "mp")), 8) == both
    # A tuple may take a cut out of several axes that the Layouts leave free.
    assert digits(b, (LAYOUT("sp", "None"), (1, 4)), 8) == {"m": (Digit(2, 2),), "n": (Digit(2, 4), Digit(2, 1))}


def test_layout_and_tuple_that_contradict() -> None:
    error = refused(matmul(), (LAYOUT("dp", "sp"), (4, 1)), 8)
    assert (
        "splits the shared factor 'k' (size 784) 2 ways, input 1 splits it 4 ways: dim 1 of input 0 over 'sp'"
        in str(error)
    )
    assert "no axis is left that cuts the factor 'n' 4 ways" in str(refused(matmul(), (LAYOUT("dp", "sp"), (2, 4)), 8))


def test_layouts_that_split_a_shared_factor_over_different_devices() -> None:
    error = refused(matmul(), (LAYOUT("dp", "sp"), LAYOUT("mp", "None")), 8)
    assert (
        "over different devices: dim 1 of input 0 over 'sp', dim 0 of input 1 over 'mp'" in str(error) and error.legal
    )
    error = refused(matmul(), (LAYOUT("dp", ("sp", "mp")), LAYOUT(("mp", "sp"), "None")), 8)
    assert "dim 1 of input 0 over ('sp', 'mp'), dim 0 of input 1 over ('mp', 'sp')" in str(error)


def test_layouts_that_use_one_axis_for_two_factors() -> None:
    error = refused(matmul(), (LAYOUT("dp", "None"), LAYOUT("None", "dp")), 8)
    assert "'m'" in str(error) and "'n'" in str(error) and error.legal
    assert "over the same devices: dim 0 of input 0 over 'dp', dim 1 of input 1 over 'dp'" in str(error)


# -- what is refused -------------------------------------------------------------------------------------------------

NORM = "a b! -> a b"


@pytest.mark.parametrize(
    "text, ins, outs, strategy, devices, message",
    [
        pytest.param(
            MATMUL,
            [(4, 8), (8, 4)],
            [(4, 4)],
            ((2, 1),),
            4,
            "1 entries for an operator with 2 tensor inputs",
            id="too few inputs",
        ),
        pytest.param(
            "... -> ...",
            [(4, 8)],
            [(4, 8)],
            ((2, 1), (1, 1)),
            4,
            "2 entries for an operator with 1 tensor",
            id="too many inputs",
        ),
        pytest.param(
            MATMUL,
            [(4, 8), (8, 4)],
            [(4, 4)],
            ((2,), (1, 1)),
            4,
            "input 0 has shape (4, 8), 2 dims; its entry",
            id="too few dims",
        ),
        pytest.param(
            MATMUL,
            [(4, 8), (8, 4)],
            [(4, 4)],
            ((2, 1, 1), (1, 1)),
            4,
            "2 dims; its entry (2, 1, 1) has 3",
            id="too many dims",
        ),
        pytest.param(
            "... -> ...",
            [(6, 8)],
            [(6, 8)],
            ((4, 1),),
            4,
            "dim 0 has size 6, which does not divide by 4",
            id="does not divide",
        ),
        pytest.param(
            MATMUL,
            [(4, 8), (8, 4)],
            [(4, 4)],
            ((1, 2), (4, 1)),
            4,
            "input 0 splits the shared factor 'k' (size 8) 2 ways, input 1 splits it 4 ways",
            id="contracted",
        ),
        pytest.param(
            MATMUL,
            [(4, 8), (8, 4)],
            [(4, 4)],
            ((4, 2), (2, 2)),
            8,
            "need 16 devices, there are 8",
            id="too many devices",
        ),
        pytest.param(
            "... -> ...",
            [(6, 8)],
            [(6, 8)],
            ((3, 1),),
            8,
            "3 parts, which does not divide 8 devices",
            id="devices do not divide",
        ),
        pytest.param(
            NORM, [(4, 8)], [(4, 8)], ((1, 2),), 4, "input 0, dim 1 (size 8) may not be split", id="kept whole"
        ),
        pytest.param("... -> ...", [(4, 8)], [(4, 8)], ((0, 1),), 4, "whole number of at least 1, not 0", id="zero"),
        pytest.param("... -> ...", [(4, 8)], [(4, 8)], ((-2, 1),), 4, "at least 1, not -2", id="negative"),
        pytest.param("... -> ...", [(4, 8)], [(4, 8)], ((True, 1),), 4, "at least 1, not True", id="bool"),
        pytest.param("... -> ...", [(4, 8)], [(4, 8)], ((2.0, 1),), 4, "at least 1, not 2.0", id="float"),
        pytest.param("... -> ...", [(4, 8)], [(4, 8)], ((None, 1),), 4, "at least 1, not None", id="none"),
        pytest.param("... -> ...", [(4, 8)], [(4, 8)], (2,), 4, "the entry of input 0 is 2", id="entry no tuple"),
        pytest.param("... -> ...", [(4, 8)], [(4, 8)], ("dp",), 4, "the entry of input 0 is 'dp'", id="entry a name"),
        pytest.param("... -> ...", [(4, 8)], [(4, 8)], 4, 4, "a tuple with one entry per tensor input", id="no tuple"),
        pytest.param(
            "... -> ...",
            [(4, 8)],
            [(4, 8)],
            LAYOUT("dp", "sp"),
            8,
            "a tuple with one entry per tensor input",
            id="bare Layout",
        ),
        pytest.param("... -> ...", [(4, 8)], [(4, 8)], (LAYOUT,), 8, "names no dims", id="uncalled Layout"),
        pytest.param(
            "... -> ...", [(4, 8)], [(4, 8)], (LAYOUT("dp"),), 8, "2 dims; its entry", id="Layout of other dims"
        ),
        pytest.param(
            "... -> ...",
            [(3, 8)],
            [(3, 8)],
            (LAYOUT("dp", "sp"),),
            8,
            "size 3, which does not divide by 2",
            id="Layout does not divide",
        ),
        pytest.param(
            NORM, [(4, 8)], [(4, 8)], (LAYOUT("dp", "sp"),), 8, "may not be split", id="Layout of a whole dim"
        ),
        pytest.param("a b -> (a b)", [(4, 8)], [(32,)], ((1, 2),), 2, "minor part", id="minor part"),
    ],
)
def test_bad_strategies_say_what_would_be_legal(text, ins, outs, strategy, devices, message) -> None:
    b = bound(text, ins, outs)
    error = refused(b, strategy, devices)
    assert message in str(error), str(error)
    assert error.legal and error.strategy == strategy
    if isinstance(strategy, tuple) and error.legal.startswith("(("):
        assignment_of(b, ast.literal_eval(error.legal), devices)


def test_layouts_of_another_device_count() -> None:
    relu = bound("... -> ...", [(4, 8)], [(4, 8)])
    error = refused(relu, (LAYOUT("dp", "sp"),), 4, LayoutError)
    assert "device matrix of 8 devices (2, 2, 2), there are 4" in str(error) and "4" in error.legal


def test_layout_errors_of_the_layout_itself() -> None:
    with pytest.raises(LayoutError, match="unknown axis 'tp'") as error:
        LAYOUT("tp", "None")
    assert "dp" in error.value.legal
    with pytest.raises(LayoutError, match="'dp' is used twice"):
        LAYOUT("dp", "dp")
    with pytest.raises(LayoutError, match="'dp' is used twice"):
        LAYOUT(("dp", "sp"), ("mp", "dp"))


CUT = st.sampled_from([1, 1, 2, 3, 4, 8, 0, -1, True, 6])


@given(strategy=st.tuples(st.tuples(CUT, CUT), st.tuples(CUT, CUT)), devices=st.sampled_from([1, 2, 4, 6, 8, 12]))
def test_a_strategy_is_honoured_exactly_or_refused_with_a_legal_one(strategy, devices) -> None:
    b = matmul(8, 12, 4)
    try:
        a = assignment_of(b, strategy, devices)
    except StrategyError as error:
        assignment_of(b, ast.literal_eval(error.legal), devices)
    else:
        (rows, inner), (other, columns) = strategy
        gathers = strategy[0] == strategy[1] and inner != other  # the contracted dim of both operands
        assert b.in_strategy(a) == (((rows, 1), (1, columns)) if gathers else strategy) and b.is_consistent(a)
        ungathered = ungathered_layouts(b, strategy, devices)
        assert ungathered == ((Layout.from_cuts(devices, strategy[0]),) * 2 if gathers else None)
        assert devices % math.prod(d.size for d in a.used) == 0
        assert assignment_of(b, tuple(b.input_layout(i, a) for i in range(2)), devices) == a


@pytest.mark.parametrize(
    "devices, strategy, legal",
    [
        (8, ((3, 1), (1, 1)), ((4, 1), (1, 1))),
        (6, ((3, 1), (1, 1)), ((2, 1), (1, 1))),
        (8, ((5, 2), (2, 1)), ((4, 2), (2, 1))),
        (8, ((1, 3), (3, 1)), ((1, 4), (4, 1))),
        (8, ((3, 4), (4, 1)), ((2, 4), (4, 1))),
        (3, ((3, 1), (1, 1)), ((1, 1), (1, 1))),
    ],
)
def test_the_nearest_cut_that_is_of_use_is_offered(devices: int, strategy: tuple, legal: tuple) -> None:
    """A dim of 32 that is to be cut 3 ways: 4 ways on 8 devices, 2 ways on 6."""
    error = refused(matmul(32, 64, 16), strategy, devices)
    assert ast.literal_eval(error.legal) == legal
    assignment_of(matmul(32, 64, 16), legal, devices)


# -- out_strategy ----------------------------------------------------------------------------------------------------


def test_out_strategy_in_both_forms() -> None:
    b = matmul()
    assert output_layouts_of(b, ((8, 1),), 8) == (Layout.of(8, [[Digit(8, 1)], []]),)
    layout = LAYOUT(("mp", "sp", "dp"), "None")
    assert output_layouts_of(b, (layout,), 8) == (layout,)


@pytest.mark.parametrize(
    "strategy, kind, message",
    [
        ((8, 1), StrategyError, "one entry per output"),
        (LAYOUT("dp", "sp"), StrategyError, "one entry per output"),
        ((8,), StrategyError, "the entry of output 0 is 8"),
        (((8,),), StrategyError, "2 dims; its entry has 1"),
        (((3, 1),), LayoutError, "does not divide 8 devices"),
        (((4, 4),), LayoutError, "need 16 devices"),
        (((0, 1),), LayoutError, "at least 1, not 0"),
        ((LAYOUT,), StrategyError, "the Layout of output 0 names no dims"),
        ((Layout((2, 2), ("a", "b"))("a", "b"),), LayoutError, "device matrix of 4 devices (2, 2), there are 8"),
    ],
)
def test_bad_out_strategies(strategy, kind, message) -> None:
    with pytest.raises(kind) as error:
        output_layouts_of(matmul(), strategy, 8)
    assert message in str(error.value) and error.value.legal and error.value.strategy == strategy


def test_an_out_strategy_that_does_not_divide() -> None:
    with pytest.raises(ShardwrightError, match="size 6, which does not divide by 4"):
        output_layouts_of(matmul(6), ((4, 1),), 4)


@pytest.mark.parametrize("cuts", [(2, 2, 2), (2, 1, 2), (1, 4, 2), (4, 2, 1), (1, 1, 2), (2, 4, 1), (1, 8, 1)])
def test_a_tuple_out_strategy_is_read_on_the_operators_own_matrix(cuts: tuple[int, int, int]) -> None:
    """The cuts that the inputs give the output keep their axes; more cuts take the axes of the sums first."""
    b = matmul()
    rows, inner, columns = cuts
    a = assignment_of(b, ((rows, inner), (inner, columns)), 8)
    natural = b.output_layout(0, a)
    (same,) = output_layouts_of(b, ((rows, columns),), 8, a)
    assert same == natural.without_partial()
    for asked in itertools.product((1, 2, 4, 8), repeat=2):
        if asked[0] * asked[1] > 8:
            continue
        (layout,) = output_layouts_of(b, (asked,), 8, a)
        assert tuple(digits_size(d) for d in layout.dims) == asked
        if asked == (rows * inner, columns):
            assert {d for dim in layout.dims for d in prime_digits(dim)} == {
                d for dim in (*natural.dims, natural.partial) for d in prime_digits(dim)
            }


def prime_digits(digits: Digits) -> list[Digit]:
    """Digits of a power of two as digits of size 2."""
    return [Digit(2, d.stride << i) for d in digits for i in range(d.size.bit_length() - 1)]


def test_a_product_keeps_its_columns() -> None:
    """8 devices: the output's columns lie on the last axis of (rows, contracted, columns) already."""

    class Product(nn.Module):
        def __init__(self, out: object) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(32, 64))
            self.product = sw.shard(torch.matmul, ((2, 2), (2, 2)), out)

        def forward(self, x: Tensor) -> Tensor:
            return self.product(x, self.w)

    x = torch.zeros(64, 32)
    sent = [
        [(c.op, c.bytes) for c in sw.plan(Product(out), (x,), devices=8).collectives(0) if c.phase == "forward"]
        for out in (((2, 2),), None)
    ]
    assert sent[0] == sent[1] and sent[0][0][0] == "all_reduce"


@pytest.mark.parametrize(
    "cuts, rows, columns",
    [
        ((2, 4), [0, 0, 0, 0, 32, 32, 32, 32], [0, 4, 8, 12, 0, 4, 8, 12]),
        ((4, 2), [0, 0, 16, 16, 32, 32, 48, 48], [0, 8, 0, 8, 0, 8, 0, 8]),
        ((4, 1), [0, 16, 32, 48, 0, 16, 32, 48], [0] * 8),
        ((1, 4), [0] * 8, [0, 0, 4, 4, 8, 8, 12, 12]),
        ((8, 1), [0, 8, 16, 24, 32, 40, 48, 56], [0] * 8),
    ],
)
def test_rows_of_a_table_stand_before_its_columns(cuts: tuple[int, int], rows: list[int], columns: list[int]) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = sw.shard(nn.Embedding(64, 16), ((1, 1), cuts))

        def forward(self, index: Tensor) -> Tensor:
            return self.table(index)

    weight = sw.plan(Table(), (torch.zeros(8, 4, dtype=torch.long),), devices=8).parameters["table.weight"]
    slices = [weight.slice(rank) for rank in range(8)]
    assert [s[0].start or 0 for s in slices] == rows and [s[1].start or 0 for s in slices] == columns
