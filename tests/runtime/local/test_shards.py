"""Values of all ranks in one tensor, in the local runtime: conversions, products and operators, against shard by
shard."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings, strategies as st
from one_device import assert_as_one_device
from test_redistributions import DEVICES, draw_layout, make_shards
from torch import nn

import shardwright as sw
from shardwright.errors import LayoutError
from shardwright.graph import Op, Value
from shardwright.layout import Digit, Layout, overlap
from shardwright.redistribution import redistribution, transpose
from shardwright.runtime.local import operators
from shardwright.runtime.local.matrix_products import product
from shardwright.runtime.local.operators import SameOnAllRanks, leading, plain_function
from shardwright.runtime.local.shards import Axes, ReplicasDiffer, convert_shards, converting, union
from shardwright.runtime.lowering import Node

D = torch.float64


@st.composite
def conversions(draw):
    """(source, target, over which digits the gradient is a sum, a shape)."""
    devices, dims = draw(st.sampled_from(DEVICES)), draw(st.integers(1, 3))
    reduction = draw(st.sampled_from(("sum", "sum", "max", "min")))
    source = draw_layout(draw, devices, dims, True, reduction)
    target = draw_layout(draw, devices, dims, False)
    if draw(st.booleans()) and not overlap(target.carried, source.partial):
        with contextlib.suppress(LayoutError):  # mixed radices: digits that do not fit beside one another
            target = target.with_partial(source.partial, reduction)
    terms = tuple(d for d in target.replicas if draw(st.booleans()))
    shape = tuple(math.lcm(a, b) * draw(st.integers(1, 2)) for a, b in zip(source.cuts, target.cuts))
    return source, target, terms, shape


def held(axes, layout):
    return axes.along(layout.carried + layout.partial)


@given(conversions(), st.integers(0, 99))
@settings(max_examples=400, deadline=None)
def test_a_conversion_is_that_of_the_shards(drawn, seed):
    source, target, _, shape = drawn
    axes = Axes.of_layouts(source.devices, (source, target))
    shards, _ = make_shards(source, shape, seed)
    found, before, after = redistribution(source, target), held(axes, source), held(axes, target)
    run = converting(axes, source, target, before, after, source.local_shape(shape))
    assume(run is not None)
    x = axes.stack(shards, before)
    kept = x.clone()
    made = run(x)
    assert made.shape == (*after, *target.local_shape(shape)) and torch.equal(x, kept)
    for one, other in zip(axes.shards(made, after), convert_shards(found, shards), strict=True):
        assert torch.equal(one, other)


@given(conversions(), st.integers(0, 99))
@settings(max_examples=400, deadline=None)
def test_a_transpose_is_that_of_the_shards(drawn, seed):
    """Tensors that were broadcast along axes of size 1 have summed their gradients; open ones have them alike."""
    source, target, terms, shape = drawn
    assume(source.reduction == "sum")
    backward = transpose(redistribution(source, target), terms)
    axes = Axes.of_layouts(source.devices, (source, target, backward.source))
    before, after, inner = held(axes, source), held(axes, target), axes.along(backward.source.partial)
    run = converting(
        axes,
        backward.source,
        backward.target,
        after,
        before,
        target.local_shape(shape),
        summed=True,
        alike=target.partial,
    )
    assume(run is not None and axes.numbers(terms) is not None)
    shards, _ = make_shards(backward.source, shape, seed)
    every = union(after, inner)
    gradient = axes.stack(shards, every)
    for k, size in enumerate(every):
        if size > (after or (1,) * len(every))[k]:
            gradient = gradient.sum(k, True)
    gradient = gradient.view(*after, *target.local_shape(shape))
    for one, other in zip(axes.shards(run(gradient), before), convert_shards(backward, shards), strict=True):
        assert torch.equal(one, other)


def test_most_conversions_need_no_list():
    """All conversions of eight ranks need none; of six ranks, those whose digits stand beside one another."""
    eight = [Layout.from_cuts(8, cuts) for cuts in ((8, 1), (1, 8), (2, 4), (4, 1), (1, 2), (4, 2), (1, 1))]
    axes = Axes.of_layouts(8, eight)
    assert axes.sizes == (2, 2, 2)
    for a in eight:
        for b in eight:
            assert converting(axes, a, b, held(axes, a), held(axes, b), a.local_shape((8, 8))) is not None
    three, two = Layout.of(6, [(Digit(3, 2),), ()]), Layout.of(6, [(Digit(2, 3),), ()])
    axes = Axes.of_layouts(6, (three, two))
    assert axes.sizes == (6,) and held(axes, three) == (6,)
    assert converting(axes, three, two, (6,), (6,), (2, 6)) is None


def test_terms_that_are_the_same_count_each():
    axes, x = Axes((2, 2)), torch.arange(3.0)
    ends = Layout.of(4, [()], [Digit(4, 1)]), Layout.replicated(4, 1)
    assert torch.equal(converting(axes, *ends, (), (), (3,))(x), 4 * x)
    assert torch.equal(converting(axes, *ends, (), (), (3,), summed=True)(x), x)


def test_a_view_moves_nothing():
    whole = torch.arange(64.0).view(8, 8)
    layouts = [Layout.replicated(8, 2), *(Layout.from_cuts(8, cuts) for cuts in ((2, 4), (8, 1), (1, 8), (4, 2)))]
    axes, x = Axes.of_layouts(8, layouts), whole
    for a, b in zip(layouts, layouts[1:] + layouts[:1]):
        x = converting(axes, a, b, held(axes, a), held(axes, b), a.local_shape((8, 8)))(x)
        assert x.data_ptr() == whole.data_ptr()
    assert torch.equal(x, whole)


# -- products ----------------------------------------------------------------------------------------------------------


def factors(x, w, transposed=False, batch=0):
    """The arguments of `product` for matrices, or batches of them."""
    lead, m, k, n = [(i,) for i in range(batch)], (batch,), (batch + 1,), (batch + 2,)
    return (x, [*lead, m, k]), (w, [*lead, n, k] if transposed else [*lead, k, n]), [*lead, m, n]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_product_is_that_of_torch(data):
    """Along each axis both differ, one or none; operands and gradients lie in memory in any order, or are expanded."""
    axes = data.draw(st.lists(st.integers(2, 3), min_size=1, max_size=3))
    transposed = data.draw(st.booleans())
    batch = [] if transposed else data.draw(st.lists(st.integers(1, 3), max_size=2))

    def operand(lead, matrix):
        bare = data.draw(st.booleans())
        sizes = ([] if bare else [s if data.draw(st.booleans()) else 1 for s in axes]) + [*lead, *matrix]
        order = data.draw(st.permutations(range(len(sizes))))
        back = sorted(range(len(sizes)), key=order.__getitem__)
        x = torch.randn([sizes[i] for i in order], dtype=D, generator=generator).permute(back)
        for i in range(len(axes) if not bare else 0):
            if sizes[i] == 1 and data.draw(st.booleans()):
                x = x.expand([axes[i] if k == i else -1 for k in range(x.dim())])
        return x.detach().requires_grad_(), bare

    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    (x, bare_x), (w, bare_w) = operand(batch, (4, 5)), operand(batch, (6, 5) if transposed else (5, 6))
    b = None
    if data.draw(st.booleans()):
        b = torch.randn(
            [
                *(
                    s if not bare_w and w.shape[i] > 1 and w.stride(i) and data.draw(st.booleans()) else 1
                    for i, s in enumerate(axes)
                ),
                *[1] * len(batch),
                1,
                6,
            ],
            dtype=D,
            generator=generator,
        )
    made = product(len(axes), *factors(not bare_x, not bare_w, transposed, len(batch)))(x, w, b)
    expected = x @ (w.mT if transposed else w)
    expected = expected if b is None else expected + b
    rank = [1] * (len(axes) + len(batch) + 2 - expected.dim())
    torch.testing.assert_close(made, expected.view(*rank, *expected.shape), rtol=1e-12, atol=1e-12)
    gradient = torch.randn(made.shape, dtype=D, generator=generator)
    for k in range(len(axes)):
        if data.draw(st.booleans()):
            gradient = gradient.narrow(k, 0, 1).expand(made.shape)
    ours, theirs = (torch.autograd.grad(y, (x, w), gradient.view(y.shape)) for y in (made, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_products_gradient_is_the_whole_parameter_s():
    """Cut by columns over the ranks that share the rows: one product of whole matrices, written where it belongs."""
    w = torch.randn(8, 12, dtype=D, requires_grad=True)
    x = torch.randn(2, 1, 3, 8, dtype=D)
    product(2, *factors(True, True))(x, w.view(8, 4, 3).permute(1, 0, 2).unsqueeze(0)).sum().backward()
    torch.testing.assert_close(w.grad, x.sum((0, 1, 2)).unsqueeze(1).expand(8, 12))
    assert w.grad.is_contiguous()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_of_nothing(transposed):
    x = torch.empty(2, 0, 3, dtype=D, requires_grad=True)
    w = torch.randn((4, 3) if transposed else (3, 4), dtype=D, requires_grad=True)
    made = product(1, *factors(True, False, transposed))(x, w)
    assert made.shape == (2, 0, 4)
    made.sum().backward()
    assert w.grad.shape == w.shape and not w.grad.any() and x.grad.shape == x.shape


# -- operators ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Operators that are called in each of the ways: once, element by element, side by side, shard by shard."""

    def __init__(self, in_strategy=None):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale, self.heads = nn.Parameter(torch.rand(8)), 2
        self.kernel = nn.Parameter(torch.randn(3, 1, 3))
        self.product = sw.shard(torch.matmul, in_strategy) if in_strategy else torch.matmul

    def forward(self, x):
        n, t, d = x.shape
        y = self.norm(x).view(n, t, self.heads, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(y, y, y.cumsum(-1)).transpose(1, 2).reshape(n, t, d)
        y = torch.cat([y * self.scale, x.softmax(-1)], -1).chunk(2, -1)[0] + x.mean(1, keepdim=True)
        y = self.down(F.gelu(self.up(y))) + self.product(y.flatten(1), torch.ones(t * d, d, dtype=x.dtype)).unsqueeze(1)
        z = F.conv1d(y.amax(-1, keepdim=True).transpose(1, 2), self.kernel, padding=1)
        return y.logsumexp(-1), z, torch.stack([y.sum(), y.std()])


@pytest.mark.parametrize("in_strategy", [None, ((2, 4), (4, 1)), ((1, 8), (8, 1)), ((4, 1), (1, 2)), ((2, 2), (2, 2))])
def test_operators_are_those_of_one_device(in_strategy):
    torch.manual_seed(0)
    assert_as_one_device(Block(in_strategy).to(D), (torch.randn(8, 4, 8, dtype=D),))


@pytest.mark.parametrize("cuts", [(4,), (2,), (1,)])
def test_an_operator_that_takes_another_s_shape(cuts):
    """The ranks have slices of one of the two operands, and the other alike."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.tanh = sw.shard(torch.tanh, (cuts,))
            self.head = nn.Parameter(torch.ones(1, dtype=D))

        def forward(self, x):
            return (
                self.tanh(x).expand_as(torch.ones(40)) * self.head,
                self.head.expand_as(self.tanh(x * 2)),
                torch.ones(40, dtype=D).expand_as(self.tanh(x * 3)) * self.head,
            )

    for mode in ("semi_auto", "sharding_propagation"):
        assert_as_one_device(Net(), (torch.linspace(-1, 1, 40, dtype=D),), devices=4, mode=mode)


def test_replicas_that_were_worked_on_apart_have_to_agree():
    axes, x = Axes((2, 2)), torch.randn(2, 1, 3, dtype=D, requires_grad=True)
    layout = Layout.of(4, [(Digit(2, 2),)])
    made = SameOnAllRanks.apply(x, axes, (2, 1), (2, 2), layout)
    gradient = torch.randn(2, 1, 3, dtype=D).expand(2, 2, 3).clone()
    assert torch.equal(torch.autograd.grad(made, x, gradient, retain_graph=True)[0], gradient[:, :1])
    gradient[1, 1, 0] += 1
    with pytest.raises(ReplicasDiffer, match="ranks 2 and 3"):
        torch.autograd.grad(made, x, gradient)
    once = torch.randn(3, dtype=D, requires_grad=True)
    made = SameOnAllRanks.apply(once, axes, (), (1, 2), Layout.replicated(4, 1))
    assert torch.equal(torch.autograd.grad(made, once, torch.ones_like(made))[0], torch.ones(3, dtype=D))


@pytest.mark.parametrize("ignored", [-100, 2])
def test_a_loss_of_rows_is_summed_for_each_rank(ignored):
    """The second rank's rows are all ignored where class 2 is."""
    sw.init(devices=4)
    target = torch.tensor([0, 1, 2, 2, 2, 1, 0, 1])
    nets = [torch.nn.Linear(6, 3, dtype=torch.float64) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)
    loss_fn = torch.nn.CrossEntropyLoss(ignore_index=ignored)
    model = sw.AutoParallel(nets[0], loss_fn=loss_fn, parallel_mode="data_parallel").dataset_strategy("full_batch")
    losses = model(x, target), loss_fn(nets[1](x), target)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14)


def test_a_function_of_torch_is_the_overload_it_stands_for():
    x, few = torch.rand(4, 6), torch.arange(5.0)
    aten = torch.ops.aten
    for target, args in [
        (aten.bernoulli.Tensor, (x, x.round())),
        (aten.div.Tensor, (x, 3)),
        (aten.sum.dim_IntList, (x, [1], True)),
        (aten.log_softmax.int, (x, 1)),
        (aten.std.dim, (x, [1], False, True)),
        (aten.max.dim, (x, 1)),
        (aten.masked_fill.Scalar, (x, x > 0.5, 1.0)),
        (aten.searchsorted.Scalar, (few, 2.0)),
        (aten.where.self, (x > 0.5, x, -x)),
        (aten.squeeze.dim, (x[:1], 0)),
        (aten.var_mean.dim, (x, [0])),
    ]:
        node = Node("node", "call_function", target)
        expected, got = target(*args), plain_function(node)(*args)
        several = isinstance(expected, tuple)
        for one, other in zip(*(expected, got) if several else ([expected], [got]), strict=True):
            assert torch.equal(one, other), target


class Products(nn.Module):
    """Products of every kind, with dims of size 1 and without."""

    def forward(self, x, v):
        y = torch.einsum("nti,nsi->nts", x, x) @ torch.einsum("nsd,od,o->nso", x, v, v[:, 0])
        z = (
            torch.einsum("ntd,oe->dn", x, v)
            + torch.tensordot(x, v, ([2], [1])).sum((1, 2))
            + torch.inner(x, v).amax((1, 2))
        )
        return (
            y,
            z,
            torch.matmul(x, v[0]),
            torch.outer(x[:, 0, 0], v[:, 0]),
            torch.einsum("nii->ni", y[:, :, :4]),
            x[:1] @ v.T,
        )


@pytest.mark.parametrize("matrix", [(4, 2), (2, 4), (8, 1)])
def test_products_of_every_kind(matrix):
    torch.manual_seed(0)
    assert_as_one_device(Products(), (torch.randn(8, 4, 8, dtype=D), torch.randn(4, 8, dtype=D)))


class Turned(nn.Module):
    """Operators whose arguments number dims from either end, or give shapes."""

    def forward(self, x):
        n, t, h, d = x.shape
        y = x.permute(0, 2, -1, 1).flatten(2).unflatten(-1, (d, t)).flip(-1).roll(1, 2).movedim(1, 3)
        y = y.diagonal(0, -2, -1).sort(-1)[0].unsqueeze(1).expand(n, t, d, -1).narrow(-1, 0, h)
        z = (
            x.cumsum(1).topk(2, dim=2)[0].prod(2, keepdim=True)
            + x.logsumexp((1, 2), keepdim=True)
            + y.amin(2, keepdim=True)
        )
        z = torch.stack([z, z.squeeze(2).unsqueeze(2)], -1).tril(1).select(-1, 1).repeat(1, 1, 2, 1).swapaxes(1, -1)
        w = z.norm(dim=(1, 2)).sum() + x.mean() + torch.diff(x, dim=1).max(dim=1)[0].sum() + x.argmax(1).sum()
        return (
            torch.cat([z.chunk(2, 1)[0], z.split([1, d - 1], 1)[1]], 1).split(2, 2)[0],
            w,
            F.pad(y, (1, 0)).gather(2, y.argsort(2)[..., :1].clamp(max=d - 1)),
            F.glu(x, -1),
            x.view(n, -1).std(1),
        )


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_dims_counted_from_either_end(devices):
    torch.manual_seed(0)
    assert_as_one_device(Turned(), (torch.randn(8, 4, 4, 4, dtype=D),), devices=devices)


@pytest.mark.parametrize(
    ("target", "args", "led", "expected"),
    [
        ("softmax.int", ("x", 1), "x", ("x", -1)),
        ("stack.default", (["x", "x"], 0), "x", (["x", "x"], -3)),
        ("sum.default", ("x",), "x", ("x", [-2, -1])),
        ("expand.default", ("x", [4, -1]), "x", ("x", [2, 3, 4, -1])),
        ("layer_norm.default", ("x", [4], "w", "w"), "x", ("x", [4], "w", "w")),
        ("layer_norm.default", ("x", [4], "w", "w"), "xw", None),  # a weight for each rank
        ("batch_norm.default", ("x", "w", "w", "w", "w", False, 0.1, 1e-5, False), "x", None),  # channels would be rows
        ("group_norm.default", ("x", 2, "w", "w"), "x", None),
        ("nll_loss_nd.default", ("x", "t", None, 0), "xt", None),  # classes would be rows
        ("squeeze.default", ("x",), "x", ("x",)),
        ("t.default", ("x",), "x", None),
        ("embedding.default", ("x", "t"), "xt", None),
        ("embedding.default", ("x", "t"), "t", ("x", "t")),
        ("bernoulli.default", ("x",), "x", None),
    ],
)
def test_only_where_a_rule_keeps_more_dims_apart(target, args, led, expected):
    """The case is as many rows as channels or classes: shapes alone do not tell."""
    named = {"x": Value("x", (4, 4), D), "w": Value("w", (4,), D), "t": Value("t", (4,), torch.int64)}

    def values(a):
        return [*map(values, a)] if isinstance(a, list) else named.get(a, a) if isinstance(a, str) else a

    packet, overload = target.split(".")
    inputs = [v for a in args for v in (values(a) if isinstance(a, list) else [values(a)]) if isinstance(v, Value)]
    made = leading(
        Op("op", getattr(getattr(torch.ops.aten, packet), overload), tuple(map(values, args)), {}, tuple(inputs), ()),
        [v.name in led for v in inputs],
        (2, 3),
    )
    assert (None if made is None else made.args) == (None if expected is None else tuple(map(values, expected)))


@given(st.data())
@settings(max_examples=150)
def test_views_leave_more_dims_alone(data):
    """Operators of which no rule is tried: a rule finds the same call."""
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6]), min_size=1, max_size=4)))
    dim = st.integers(-len(shape), len(shape) - 1)
    target = data.draw(st.sampled_from(sorted(operators.APART, key=str)))
    rest = {
        "split": lambda: (data.draw(st.integers(1, 4)), data.draw(dim)),
        "slice": lambda: (data.draw(dim), data.draw(st.integers(0, 2)), data.draw(st.integers(-1, 9)), 1),
        "select": lambda: (data.draw(dim), 0),
        "transpose": lambda: (data.draw(dim), data.draw(dim)),
        "permute": lambda: (data.draw(st.permutations(range(len(shape)))),),
    }.get(target.overloadpacket.__name__, lambda: (sizes_of(data, math.prod(shape)),))()
    x, more = Value("x", shape, D), data.draw(st.sampled_from([(2,), (3, 2), (5,)]))
    op = Op("op", target, (x, *rest), {}, (x,), ())
    tried = operators._found(op, (True,), more)
    assert tried is not None or 0 in operators._run(op).outputs[0].shape
    made = leading(op, (True,), more)
    assert tried is None or (made.target, made.args, made.kwargs) == (tried.target, tried.args, tried.kwargs)


def sizes_of(data, elements):
    """The sizes of a view; one of them may be left to torch."""
    sizes = []
    while elements > 1 or data.draw(st.integers(0, 3)) == 3:
        sizes.append(data.draw(st.sampled_from([n for n in range(elements, 0, -1) if elements % n == 0])))
        elements //= sizes[-1]
    if sizes and data.draw(st.booleans()):
        sizes[data.draw(st.integers(0, len(sizes) - 1))] = -1
    return sizes
