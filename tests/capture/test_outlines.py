"""Formulas of operators beside the kernels, for calls that are made at random."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from shardwright.capture.outlines import by_formula, computed, form_of_arguments
from shardwright.rules import result_shapes

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
SIZES = st.sampled_from([1, 1, 2, 3, 5, 8])
FORMULAS = result_shapes._FORMULAS


def shapes(least=0, most=4):
    return st.lists(SIZES, min_size=least, max_size=most).map(tuple)


@st.composite
def tensors(draw, shape, dtype):
    grad = dtype.is_floating_point and draw(st.booleans())
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


@st.composite
def elementwise(draw, target):
    kinds = (torch.bool, torch.bool, torch.int64) if FORMULAS[target] is result_shapes._of_truths else ()
    dtype = draw(st.sampled_from(kinds or (*FLOATS, *INTEGERS, torch.bool)))
    shape = draw(shapes())
    x = draw(tensors(shape, dtype))
    if [str(a.type) for a in target._schema.arguments].count("Tensor") == 1:
        return (x, draw(st.sampled_from([0, 2, 3.0]))) if "Scalar" in str(target) else (x,)
    other = tuple(1 if draw(st.booleans()) else size for size in shape[draw(st.integers(0, len(shape))) :])
    y = draw(
        tensors(draw(st.sampled_from([shape, other, draw(shapes())])), draw(st.sampled_from([dtype] * 4 + [*FLOATS])))
    )
    if "Tensor" in str(target) and "__" not in str(target) and draw(st.integers(0, 5)) == 0:
        return x, draw(st.sampled_from([1, 2.5, True]))
    return (x, y) if draw(st.booleans()) else (y, x)


@st.composite
def norms(draw, target):
    shape, dtype = draw(shapes(1)), draw(st.sampled_from(FLOATS))
    normalized = list(shape[draw(st.integers(0, len(shape) - 1)) :])
    weights = [draw(tensors(normalized, dtype)) for _ in range(draw(st.integers(0, 2)))]
    return (draw(tensors(shape, dtype)), normalized, *weights, *([1e-6] if len(weights) == 2 else []))


@st.composite
def linears(draw, target):
    shape, dtype, out = draw(shapes(1)), draw(st.sampled_from(FLOATS)), draw(SIZES)
    bias = [draw(tensors((out,), dtype))] if draw(st.booleans()) else []
    return draw(tensors(shape, dtype)), draw(tensors((out, shape[-1]), dtype)), *bias


@st.composite
def products(draw, target):
    dtype = draw(st.sampled_from(FLOATS))
    batch = draw(shapes(0, 2)) if target is aten.matmul.default else (draw(SIZES),) * (target is aten.bmm.default)
    i, k, j = draw(SIZES), draw(SIZES), draw(SIZES)
    pair = draw(tensors((*batch, i, k), dtype)), draw(tensors((*batch, k, j), dtype))
    if target is not aten.addmm.default:
        return pair
    return draw(tensors(draw(st.sampled_from([(j,), (i, j), (1, j), (i, 1), (1,)])), dtype)), *pair


@st.composite
def embeddings(draw, target):
    rows = draw(tensors((draw(SIZES), draw(SIZES)), draw(st.sampled_from(FLOATS))))
    return rows, draw(tensors(draw(shapes(0, 3)), draw(st.sampled_from([torch.int64, torch.int32]))))


@st.composite
def losses(draw, target):
    dtype, rows, classes = draw(st.sampled_from(FLOATS)), draw(SIZES), draw(SIZES)
    more = draw(st.sampled_from([(), (None,), (None, 0), (None, 1), (None, 2), (None, 1, -100, 0.1), "weight"]))
    more = (draw(tensors((classes,), dtype)),) if more == "weight" else more
    return draw(tensors((rows, classes), dtype)), draw(tensors((rows,), torch.int64)), *more


@st.composite
def sums(draw, target):
    shape = draw(shapes(1))
    return draw(tensors(shape, draw(st.sampled_from((*FLOATS, *INTEGERS, torch.bool))))), draw(
        st.integers(-len(shape), len(shape) - 1)
    )


@st.composite
def shares(draw, target):
    shape = draw(shapes(1))
    dim, dtype = draw(st.integers(-len(shape), len(shape) - 1)), draw(st.sampled_from([(), (None,), (torch.float64,)]))
    return draw(tensors(shape, draw(st.sampled_from(FLOATS)))), dim, *dtype


@st.composite
def views(draw, target):
    shape = draw(shapes())
    rest, sizes = math.prod(shape), []
    while rest > 1 or draw(st.integers(0, 3)) == 3:
        sizes.append(draw(st.sampled_from([n for n in range(rest, 0, -1) if rest % n == 0])))
        rest //= sizes[-1]
    if sizes and draw(st.booleans()):
        sizes[draw(st.integers(0, len(sizes) - 1))] = -1
    return draw(tensors(shape, draw(st.sampled_from((*FLOATS, torch.int64, torch.bool))))), sizes


OTHERS = {
    aten.layer_norm.default: norms,
    aten.linear.default: linears,
    aten.mm.default: products,
    aten.bmm.default: products,
    aten.matmul.default: products,
    aten.addmm.default: products,
    aten.embedding.default: embeddings,
    aten.cross_entropy_loss.default: losses,
    aten.cumsum.default: sums,
    aten.softmax.int: shares,
    aten.log_softmax.int: shares,
    aten.view.default: views,
    aten.reshape.default: views,
}


@pytest.mark.parametrize("target", FORMULAS, ids=str)
def test_a_formula_gives_what_the_kernels_give(target):
    compared = []

    @settings(max_examples=60)
    @given(OTHERS.get(target, elementwise)(target), st.booleans())
    def compare(args, grad):
        inputs = []
        form_of_arguments(args, inputs)
        with torch.set_grad_enabled(grad):
            found = by_formula(target, args, {}, inputs)
            if found is None:
                return
            try:
                compared.append(computed(target, args, {}))
            except RuntimeError:  # no number in the place of a tensor, an empty dim
                return
            assert found == compared[-1]
            if target is aten.embedding.default:  # its indices have to be numbers of rows
                return
            real = iter([torch.zeros(x.shape, dtype=x.dtype).requires_grad_(x.requires_grad and grad) for x in inputs])
            made = target(*[next(real) if isinstance(a, torch.Tensor) else a for a in args])
        assert (tuple(made.shape), made.stride(), made.dtype) == found.form[:3]
        assert made.requires_grad == found.requires_grad

    compare()
    assert compared


@pytest.mark.parametrize(
    "target, args",
    [
        (aten.add.Tensor, (torch.empty(4, 6).t(), torch.empty(6, 4))),  # strides that the result takes over
        (aten.add.Tensor, (torch.empty(4), torch.empty(4, dtype=torch.float64))),  # a promotion
        (aten.add.Tensor, (torch.empty(4, dtype=torch.int64), 0.5)),
        (aten.add.Tensor, (torch.empty(4), torch.empty(5))),  # an error
        (aten.mul.Tensor, (torch.empty(4, dtype=torch.bool), 2)),
        (aten.add.Tensor, (torch.empty(4), 1j)),
        (aten.relu.default, (torch.empty(4, dtype=torch.int64),)),
        (aten.relu.default, (torch.empty(0, 4),)),
        (aten.mm.default, (torch.empty(4, 3), torch.empty(4, 3))),
        (aten.linear.default, (torch.empty(4, 3), torch.empty(4, 2))),
        (aten.linear.default, (torch.empty(2, 3, 4).transpose(0, 1), torch.empty(5, 4))),
        (aten.layer_norm.default, (torch.empty(4, 3), [4], torch.empty(4))),
        (aten.cross_entropy_loss.default, (torch.empty(4, 3), torch.empty(4, dtype=torch.int64), None, 0)),
        (aten.cross_entropy_loss.default, (torch.empty(4, 3), torch.empty(4, 3), None, 1)),  # shares of classes
        (aten.cross_entropy_loss.default, (torch.empty(4, 3), torch.empty(5, dtype=torch.int64), None, 1)),
        (aten.view.default, (torch.empty(4, 3), [5, -1])),
        (aten.view.default, (torch.empty(4, 3), [4, 4])),
        (aten.view.default, (torch.empty(4, 3), [-1, -1, 2])),
        (aten.view.default, (torch.empty(4, 3), [-4, -3])),
        (aten.cumsum.default, (torch.empty(4, 3), 2)),
        (aten.softmax.int, (torch.empty(4, 3), -3)),
        (aten.conv2d.default, (torch.empty(1, 3, 4, 4), torch.empty(2, 3, 1, 1))),
    ],
)
def test_no_formula_tells_of_other_calls(target, args):
    inputs = []
    form_of_arguments(args, inputs)
    assert by_formula(target, args, {}, inputs) is None


def test_no_formula_tells_of_named_arguments():
    x = torch.empty(4)
    assert by_formula(aten.add.Tensor, (x, x), {}, (x, x)) is not None
    assert by_formula(aten.add.Tensor, (x, x), {"alpha": 2}, (x, x)) is None
