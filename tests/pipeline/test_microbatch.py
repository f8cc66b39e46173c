"""A batch in micro-batches against the whole of it, in float64: what a model returns, and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.errors import ShardwrightError
from shardwright.graph import SEED, Graph, Value
from shardwright.pipeline.build import is_split, micro_calls
from shardwright.pipeline.microbatch import split
from shardwright.pipeline.pipeline_plan import Join, MicrobatchPlan
from shardwright.planfile.encoding import fingerprint, read_graph, write_graph
from shardwright.process_runtime import of_micro_batch
from shardwright.verification.node_comparison import call

D = torch.float64


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, count: int = 5, ignored: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, count, shape, generator=generator)
    return drawn.masked_fill(torch.rand(shape, generator=generator) < ignored, -100)


def micro_of(
    net: nn.Module, args: tuple, count: int, kwargs: dict[str, Any] | None = None, **options: Any
) -> MicrobatchPlan:
    graph, *wide = [capture(net, *call) for call in micro_calls(args, kwargs, count)]
    return split(graph, count, *wide, **options)


def ran(graph: Graph, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """All values of a graph, of those of its sources."""
    values = values | graph.constants
    for op in graph.ops:
        for value, out in zip(op.outputs, call(op, values)):
            if value is not None:
                values[value.name] = out
    return values


def slices(args: tuple, kwargs: dict[str, Any] | None, count: int, parts: int) -> list[list[Tensor]]:
    """The tensors that each micro-batch gets: a piece of each part of the batch."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
    return [
        [
            torch.cat([p.chunk(count)[k] for p in x.chunk(parts)]) if cut else x
            for x, cut in zip(tensors, is_split(args, kwargs))
        ]
        for k in range(count)
    ]


def in_micro_batches(
    net: nn.Module,
    micro: MicrobatchPlan,
    args: tuple,
    count: int,
    kwargs: dict[str, Any] | None = None,
    parts: int = 1,
    seeds: list[Tensor] | None = None,
) -> tuple[list[Any], dict[str, Tensor]]:
    """The outputs of the whole batch and the buffers after it, run as the notation of `micro` says."""
    state = {v.name: dict(net.named_parameters())[n] for n, v in micro.graph.parameters.items()}
    state |= {v.name: dict(net.named_buffers())[n].clone() for n, v in micro.graph.buffers.items()}
    feeding = slices(args, kwargs, count, parts)
    names = [v.name for v in micro.graph.inputs[: len(feeding[0])]]
    totals: dict[str, Tensor] = {}
    if micro.counts is not None:
        assert {v.name for v in micro.counts.inputs} <= set(names) and not micro.counts.parameters
        each = [ran(micro.counts, state | dict(zip(names, x))) for x in feeding]
        assert len(micro.counts.outputs) == len(micro.totals)
        totals = {name: sum(values[v.name] for values in each) for name, v in zip(micro.totals, micro.counts.outputs)}
    made, updated = [], []
    for k, x in enumerate(feeding):
        seed = {SEED.name: seeds[k]} if seeds else {}
        values = ran(micro.graph, state | totals | dict(zip(names, x)) | seed)
        made.append([values[o.name] if isinstance(o, Value) else o for o in micro.graph.outputs])
        state |= {
            micro.graph.buffers[n].name: values[v.name].detach()
            for n, v in micro.graph.updates.items()
            if n not in micro.updates
        }
        updated.append({n: values[micro.graph.updates[n].name].detach() for n in micro.updates})
    state |= {
        micro.graph.buffers[n].name: joined(join, [u[n] for u in updated], parts) for n, join in micro.updates.items()
    }
    outputs = [joined(join, [m[i] for m in made], parts) for i, join in enumerate(micro.joins)]
    return outputs, {n: state[v.name] for n, v in micro.graph.buffers.items()}


def joined(join: Join | None, made: list[Any], parts: int) -> Any:
    if join is None:
        return made[0]
    if join.how == "cat":
        pieces = [x.chunk(parts, join.dim) for x in made]
        return torch.cat([p[i] for i in range(parts) for p in pieces], join.dim)
    if join.how == "same":
        assert all(torch.equal(x, made[0]) for x in made)
    return sum(made) if join.how == "sum" else sum(made) / len(made)


def weighed(outputs: list[Any]) -> Tensor:
    """One number of all outputs, with a weight of its own for each element."""
    floating = [x for x in outputs if isinstance(x, Tensor) and x.is_floating_point()]
    return sum(((x * numbers(*x.shape, seed=i + 7)).sum() for i, x in enumerate(floating)), torch.zeros(()))


def check(
    net: nn.Module, *args: Any, count: int = 4, kwargs: dict[str, Any] | None = None, exact: float = 1e-12
) -> MicrobatchPlan:
    """Outputs and gradients of parameters are those of the whole batch. Returns what was run."""
    net = net.double()
    micro = micro_of(net, args, count, kwargs)
    outputs, buffers = in_micro_batches(net, micro, args, count, kwargs)
    expected = pytree.tree_leaves(net(*args, **(kwargs or {})))
    for n in micro.updates:
        torch.testing.assert_close(buffers[n], dict(net.named_buffers())[n].detach(), rtol=exact, atol=exact)
    assert len(outputs) == len(expected)
    for ours, theirs in zip(outputs, expected):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(ours, theirs, rtol=exact, atol=exact)
        else:
            assert ours == theirs
    parameters = [p for p in net.parameters() if p.requires_grad]
    if parameters and weighed(expected).requires_grad:
        ours, theirs = (torch.autograd.grad(weighed(x), parameters, allow_unused=True) for x in (outputs, expected))
        for a, b in zip(ours, theirs):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=exact, atol=exact)
    return micro


class Scored(nn.Module):
    """Scores of rows, and a function of them and of the other inputs."""

    def __init__(self, function: Callable[..., Any], features: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, features)
        self.function = function
        self.register_buffer("weight", torch.linspace(0.1, 2.0, features))

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.function(self, self.layer(x), *others)


X, T = numbers(8, 6), classes(8, ignored=0.4)
XS, TS = numbers(8, 3, 6), classes(8, 3, ignored=0.4)


def uneven(*shape: int) -> Tensor:
    """A mask that keeps other numbers of rows in each micro-batch."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.6


def expanded(x: Tensor, like: Tensor) -> Tensor:
    """An operator that is there for several rows alone."""
    return x if len(x) == len(like) else x.expand(len(like), -1)


# -- outputs and losses ------------------------------------------------------------------------------------------------

PLAIN = {
    "rows": (lambda m, z: z, "cat", X),
    "transposed": (lambda m, z: z.t(), "cat", X),
    "merged": (lambda m, z: z.flatten(0, 1).relu(), "cat", XS),
    "mse": (lambda m, z, y: F.mse_loss(z, y), "mean", X, numbers(8, 5, seed=2)),
    "mse of a sum": (lambda m, z, y: F.mse_loss(z, y, reduction="sum"), "sum", X, numbers(8, 5, seed=2)),
    "mse of each": (lambda m, z, y: F.mse_loss(z, y, reduction="none").mean(1), "cat", X, numbers(8, 5, seed=2)),
    "l1": (lambda m, z, y: F.l1_loss(z, y), "mean", X, numbers(8, 5, seed=2)),
    "smooth l1": (lambda m, z, y: F.smooth_l1_loss(z, y), "mean", X, numbers(8, 5, seed=2)),
    "huber": (lambda m, z, y: F.huber_loss(z, y), "mean", X, numbers(8, 5, seed=2)),
    "logits": (
        lambda m, z, y: F.binary_cross_entropy_with_logits(z, y, pos_weight=m.weight),
        "mean",
        X,
        uneven(8, 5).double(),
    ),
    "kl of rows": (
        lambda m, z, y: F.kl_div(z.log_softmax(1), y.softmax(1), reduction="batchmean"),
        "mean",
        X,
        numbers(8, 5, seed=2),
    ),
    "poisson": (lambda m, z, y: F.poisson_nll_loss(z, y.abs()), "mean", X, numbers(8, 5, seed=2)),
    "triplet": (lambda m, z, y: F.triplet_margin_loss(z, y, y + 1), "mean", X, numbers(8, 5, seed=2)),
    "margin": (lambda m, z, y: F.multi_margin_loss(z, y), "mean", X, classes(8)),
    "probabilities": (
        lambda m, z, y: F.cross_entropy(z, y.softmax(1), weight=m.weight, label_smoothing=0.1),
        "mean",
        X,
        numbers(8, 5, seed=2),
    ),
    "mean": (lambda m, z: z.exp().mean(), "mean", X),
    "mean over rows": (lambda m, z: z.exp().mean(0), "mean", X),
    "mean of means": (lambda m, z: z.exp().mean((0, 1)).mean(), "mean", XS),
    "sum": (lambda m, z: z.exp().sum(), "sum", X),
    "sum over rows": (lambda m, z: z.exp().sum(0, keepdim=True), "sum", X),
    "sum in a product": (lambda m, z: torch.einsum("nk,nl->kl", z, z), "sum", X),
    "sum of a transposed product": (lambda m, z: z.t() @ z, "sum", X),
    "chosen of each row": (lambda m, z, y: z[torch.arange(len(z)), y], "cat", X, classes(8)),
    "places of each row": (
        lambda m, z, y: z[torch.arange(len(z)).unsqueeze(1), y.view(-1, 1) % 3],
        "cat",
        XS,
        classes(8),
    ),
    "expanded where need be": (lambda m, z: expanded(torch.arange(5).view(1, 5), z) * z, "cat", X),
    "count": (lambda m, z, y: (z.argmax(1) == y).sum(), "sum", X, T),
    "accuracy": (lambda m, z, y: (z.argmax(1) == y).double().mean(), "mean", X, T),
    "of the parameters": (lambda m, z: m.layer.weight.pow(2).sum(), "same", X),
    "scaled": (lambda m, z: 2 * z.exp().mean() / 3 - 1, "mean", X),
    "cast": (lambda m, z: z.exp().sum().to(torch.float32).to(D).neg().reshape(1), "sum", X),
    "stacked": (lambda m, z: torch.stack([z.mean(), z.exp().mean()]).sum(), "mean", X),
    "divided by a parameter": (lambda m, z: z.exp().sum() / m.layer.weight.pow(2).sum(), "sum", X),
}


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_reductions(name: str, count: int) -> None:
    function, how, *args = PLAIN[name]
    micro = check(Scored(function), *args, count=count, exact=1e-6 if name == "cast" else 1e-12)
    assert [join.how for join in micro.joins] == [how]
    assert not micro.totals and micro.counts is None


MIXED = {
    "with what is the same": (lambda m, z, y: F.mse_loss(z, y) + 0.1 * m.layer.weight.pow(2).sum(), "mean"),
    "the same with a sum": (lambda m, z, y: 0.1 * m.layer.weight.pow(2).sum() - z.exp().sum(), "sum"),
    "mean and sum": (lambda m, z, y: F.mse_loss(z, y) + 3 * z.exp().sum(), "sum"),
    "sum and mean": (lambda m, z, y: torch.add(z.exp().sum(), F.mse_loss(z, y), alpha=-2), "sum"),
    "sum and a number": (lambda m, z, y: 5 - (z.exp().sum() + 3), "sum"),
    "stacked": (lambda m, z, y: torch.stack([z.sum(), z.mean(), m.layer.bias.sum()]), "sum"),
    "a sum divided by the rows": (lambda m, z, y: z.exp().sum() / z.shape[0], "mean"),
    "a sum times one over the elements": (lambda m, z, y: z.exp().sum() * (1 / z.numel()), "mean"),
    "a mean times the rows": (lambda m, z, y: F.mse_loss(z, y) * len(z), "sum"),
    "three kinds": (
        lambda m, z, y: z.exp().sum() / len(z) + m.layer.bias.sum() + F.mse_loss(z, y, reduction="sum"),
        "sum",
    ),
}


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", MIXED)
def test_sums_meet_means_and_what_is_the_same(name: str, count: int) -> None:
    function, how = MIXED[name]
    assert [j.how for j in check(Scored(function), X, numbers(8, 5, seed=2), count=count).joins] == [how]


COUNTED = {
    "cross entropy": (lambda m, z, y: F.cross_entropy(z, y), X, T),
    "weights": (lambda m, z, y: F.cross_entropy(z, y, weight=m.weight), X, T),
    "constant weights": (lambda m, z, y: F.cross_entropy(z, y, weight=torch.arange(1, 6, dtype=D)), X, T),
    "smoothing": (lambda m, z, y: F.cross_entropy(z, y, weight=m.weight, label_smoothing=0.2), X, T),
    "another index": (lambda m, z, y: F.cross_entropy(z, y, ignore_index=3), X, classes(8)),
    "nll": (lambda m, z, y: F.nll_loss(z.log_softmax(1), y), X, T),
    "places": (lambda m, z, y: F.cross_entropy(z.transpose(1, 2), y), XS, TS),
    "tokens": (lambda m, z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()), XS, TS),
    "shifted": (lambda m, z, y: F.cross_entropy(z[:, :-1].reshape(-1, 5), y[:, 1:].reshape(-1)), XS, TS),
    "shifted by padding": (
        lambda m, z, y: F.cross_entropy(z.view(-1, 5), F.pad(y, (0, 1), value=-100)[..., 1:].contiguous().view(-1)),
        XS,
        TS,
    ),
    "in a sum of losses": (lambda m, z, y: F.cross_entropy(z, y) + z.pow(2).mean() + m.layer.weight.abs().sum(), X, T),
    "masked": (lambda m, z, y: (F.cross_entropy(z, y, reduction="none") * (y >= 0)).sum() / (y >= 0).sum(), X, T),
    "masked, at least one": (
        lambda m, z, y: F.cross_entropy(z, y, reduction="sum") / (y >= 0).sum().clamp(min=1),
        X,
        T,
    ),
    "masked by means": (lambda m, z, y: (z.pow(2).sum(1) * (y >= 0)).mean() / (y >= 0).double().mean(), X, T),
    "twice the same": (lambda m, z, y: (F.cross_entropy(z, y) - F.cross_entropy(2 * z, y, reduction="mean")) / 2, X, T),
    "normalised inputs": (lambda m, z, x: (z * (x - x.mean(0))[:, :5]).sum(), X, numbers(8, 6, seed=4)),
}


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", COUNTED)
def test_means_of_what_counts(name: str, count: int) -> None:
    function, *args = COUNTED[name]
    micro = check(Scored(function), *args, count=count)
    assert [j.how for j in micro.joins] == ["mean" if name == "masked by means" else "sum"] and micro.totals
    assert tuple(v.name for v in micro.graph.inputs[-len(micro.totals) :]) == micro.totals
    assert len({v.name for v in micro.graph.inputs}) == len(micro.graph.inputs)


def test_the_mean_of_micro_batches_would_be_another() -> None:
    """The purpose of the totals: parts of the batch in which other numbers of targets count."""
    net = Scored(lambda m, z, y: F.cross_entropy(z, y)).double()
    means = [F.cross_entropy(net.layer(x), y) for x, y in zip(X.chunk(2), T.chunk(2))]
    assert abs(sum(means) / 2 - net(X, T)).item() > 1e-3


def test_a_counted_loss_keeps_its_name_and_mark() -> None:
    net = Scored(lambda m, z, y: m.loss(z, y))
    net.loss = sw.shard(F.cross_entropy, in_strategy=((2, 1), (2,)))
    micro = micro_of(net, (X.float(), T), 2)
    (op,) = (op for op in micro.graph.ops if op.kind == "cross_entropy_loss")
    (before,) = (
        op for op in capture(net, *micro_calls((X.float(), T), None, 2)[0]).ops if op.kind == op.kind and op.mark
    )
    assert (op.name, op.module, op.source, op.mark) == (before.name, before.module, before.source, before.mark)
    assert op.argument("reduction") == 2 and op.mark is not None
    assert [v.name for v in micro.counts.inputs] == ["others_0"] and micro.counts.outputs[0].dtype == torch.float32


def test_half_precision_is_summed_wide() -> None:
    net = Scored(lambda m, z, y: F.cross_entropy(z, y)).bfloat16()
    micro = micro_of(net, (X.bfloat16(), T), 2)
    assert [v.dtype for v in micro.counts.outputs] == [torch.float32]
    (loss,), _ = in_micro_batches(net, micro, (X.bfloat16(), T), 2)
    assert loss.dtype == torch.bfloat16
    torch.testing.assert_close(loss, net(X.bfloat16(), T), rtol=2e-2, atol=0)


def test_what_only_counted_is_gone() -> None:
    micro = check(Scored(COUNTED["masked"][0]), X, T)
    assert [op.kind for op in micro.counts.ops] == ["ge", "sum"]
    assert [op.kind for op in micro.graph.ops].count("sum") == 1


def test_one_micro_batch_is_the_graph_itself() -> None:
    net = Scored(lambda m, z, y: (F.cross_entropy(z, y), z, 3))
    graph = capture(net, (X.float(), T))
    assert split(graph, 1) == MicrobatchPlan(graph, (Join("same"), Join("same"), None))


# -- models ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention with the sequence first inside, as torch has it: the batch is a minor part of merged dims."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.places = nn.Embedding(11, 8), nn.Parameter(torch.randn(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Any]:
        x = self.embedding(tokens) + torch.arange(tokens.shape[1], dtype=D).unsqueeze(1) / 10
        x = torch.cat([self.places.expand(len(x), -1, -1), x], 1)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])[:, 1:]
        state = torch.zeros(len(x), 8, dtype=D)
        for step in x.unbind(1):
            state = torch.tanh(state + step)
        scores = self.head(x) + self.head(state).unsqueeze(1)
        loss = F.cross_entropy(scores[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1))
        return {"loss": loss, "scores": scores, "step": 3}


@pytest.mark.parametrize("count", [2, 4])
def test_a_transformer_block(count: int) -> None:
    tokens = classes(4, 6, count=11)
    micro = check(Block(), tokens, tokens.masked_fill(uneven(4, 6), -100), count=count)
    assert micro.joins == (Join("sum"), Join("cat", 0), None)


@pytest.mark.parametrize("count", [2, 4])
def test_a_model_of_hugging_faces(count: int) -> None:
    """The model makes its mask of row numbers; one row has other operators than several; its loss is in float32."""
    transformers = pytest.importorskip("transformers")
    net = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        )
    ).eval()

    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            made = self.net(input_ids=tokens, labels=labels, use_cache=False)
            return made.loss, made.logits

    tokens = classes(4, 6, count=16)
    micro = check(Trained(), tokens, tokens.masked_fill(uneven(4, 6), -100), count=count, exact=1e-6)
    assert micro.joins == (Join("sum"), Join("cat"))


class Convolved(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), norm, nn.Linear(4, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


def test_a_convolutional_network() -> None:
    check(Convolved(nn.GroupNorm(2, 4)), numbers(8, 3, 6, 6), T)
    check(Convolved(nn.BatchNorm2d(4)).eval(), numbers(8, 3, 6, 6), T)


def test_batch_norm_has_the_statistics_of_each_micro_batch() -> None:
    net, x = Convolved(nn.BatchNorm2d(4)).double(), numbers(8, 3, 6, 6)
    micro = micro_of(net, (x, T), 2)
    (loss,), buffers = in_micro_batches(net, micro, (x, T), 2)
    terms = [
        F.cross_entropy(net.head(F.max_pool2d(net.norm(net.conv(p)).relu(), 2).mean((2, 3))), y, reduction="sum")
        for p, y in zip(x.chunk(2), T.chunk(2))
    ]
    torch.testing.assert_close(loss, sum(terms) / (T >= 0).sum())
    assert buffers["norm.num_batches_tracked"] == 2
    torch.testing.assert_close(buffers["norm.running_var"], net.norm.running_var)


def test_inputs_that_are_not_split_are_the_same_for_all() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor, *, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
            return self.layer(x) * mask * scale, mask.sum()

    micro = check(Masked(), X, kwargs={"mask": uneven(1, 6).double(), "scale": 0.5})
    assert micro.joins == (Join("cat"), Join("same"))
    assert micro.graph.batch == {"x": 0}


@given(
    st.lists(st.sampled_from(["mse", "ce", "sum", "same", "rows", "number"]), min_size=1, max_size=4),
    st.sampled_from([2, 4, 8]),
    st.integers(0, 2**16),
)
@settings(max_examples=15, deadline=None)
def test_any_sum_of_losses(terms: list[str], count: int, seed: int) -> None:
    """However what is reduced in one way is added to what is reduced in another."""
    weights = numbers(len(terms), seed=seed).tolist()
    made = {
        "mse": lambda m, z, y: z.pow(2).mean(),
        "ce": lambda m, z, y: F.cross_entropy(z, y),
        "sum": lambda m, z, y: z.sum(),
        "same": lambda m, z, y: m.layer.bias.pow(2).sum(),
        "rows": lambda m, z, y: z.exp().sum() / len(z),
        "number": lambda m, z, y: 2.5,
    }

    def function(m: Scored, z: Tensor, y: Tensor) -> Tensor:
        total = z.mean() * 0.1
        for term, weight in zip(terms, weights):
            total = total + made[term](m, z, y) * weight
        return total

    check(Scored(function), X, T.roll(seed % 8), count=count)


# -- random numbers ----------------------------------------------------------------------------------------------------


class Drawn(nn.Module):
    """Random numbers for rows, for rows in a minor part of a dim, for what has no rows, and from nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.attention = nn.Linear(6, 6), nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)
        self.place = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = F.dropout(self.layer(x), 0.4) + F.dropout(self.place, 0.5)
        x = x + self.attention(x, x, x, need_weights=False)[0] * (torch.rand(len(x), 1, 1, dtype=D) < 0.7)
        x = F.dropout(x.transpose(0, 1).reshape(-1, 6), 0.2).view(3, -1, 6).transpose(0, 1)
        x = x + F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.4)
        x = x + 0.1 * torch.randn_like(x) + F.dropout1d(x.transpose(1, 2), 0.3).transpose(1, 2)
        x = F.alpha_dropout(x.flatten(0, 1), 0.2).view_as(x)
        noise = torch.multinomial(x.detach().abs().flatten(0, 1), 2, replacement=True)
        return F.cross_entropy(x[:, 0], y), x + noise.double().mean(1).view(len(x), 3, 1)


SEED_OF_CALL = torch.tensor([11, 3, 1, 0])


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_random_numbers_are_those_of_the_whole_batch(count: int, parts: int) -> None:
    net, args = Drawn().double(), (XS, classes(8, ignored=0.3))
    whole = capture(net, args)
    values = ran(
        whole,
        {v.name: dict(net.named_parameters())[n] for n, v in whole.parameters.items()}
        | {v.name: x for v, x in zip(whole.inputs, args)}
        | {SEED.name: SEED_OF_CALL},
    )
    expected = [values[o.name] for o in whole.outputs]
    micro = micro_of(net, args, count, parts=parts)
    assert count == 1 or len([op for op in micro.graph.ops if op.micro is not None]) == 9
    outputs, _ = in_micro_batches(
        net, micro, args, count, parts=parts, seeds=[of_micro_batch(SEED_OF_CALL, k) for k in range(count)]
    )
    for ours, theirs in zip(outputs, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(weighed(x), list(net.parameters())) for x in (outputs, expected))):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_a_document_holds_where_the_rows_lie() -> None:
    micro = micro_of(Drawn(), (XS.float(), classes(8)), 4, parts=2)
    held = read_graph(write_graph(micro.graph))
    assert [op.micro for op in held.ops] == [op.micro for op in micro.graph.ops]
    assert fingerprint(held) != fingerprint(micro_of(Drawn(), (XS.float(), classes(8)), 4, parts=1).graph)


# -- what cannot be split ----------------------------------------------------------------------------------------------

REFUSED = {
    "exp of a loss": (lambda m, z, y: F.cross_entropy(z, y).exp(), "exp"),
    "root of a mean": (lambda m, z, y: z.pow(2).mean().sqrt(), "sqrt"),
    "product of means": (lambda m, z, y: z.mean() * z.exp().mean(), "mul"),
    "quotient of sums": (lambda m, z, y: z.sum() / z.exp().sum(), "div"),
    "largest row": (lambda m, z, y: z.amax(0), "amax"),
    "running sum": (lambda m, z, y: z.cumsum(0), "cumsum"),
    "order": (lambda m, z, y: z.sort(0).values, "sort"),
    "softmax over rows": (lambda m, z, y: z.softmax(0), "softmax"),
    "variance": (lambda m, z, y: z.var(0), "var"),
    "norm": (lambda m, z, y: z.norm(), "norm"),
    "standardised": (lambda m, z, y: z - z.mean(0), "sub"),
    "pairs of rows": (lambda m, z, y: z @ z.t(), "matmul"),
    "first rows": (lambda m, z, y: z[:1], "slice"),
    "chosen rows": (lambda m, z, y: z[torch.tensor([0, 0])], "index"),
    "rows turned": (lambda m, z, y: z.roll(1, 0), "roll"),
    "places in the batch": (lambda m, z, y: z * torch.arange(len(z)).unsqueeze(1), "mul"),
    "numbers of rows": (lambda m, z, y: torch.arange(len(z)), "arange"),
    "elements by numbers of rows": (lambda m, z, y: z.reshape(-1)[torch.arange(len(z))], "index"),
    "columns by numbers of rows": (lambda m, z, y: z[:, torch.arange(len(z))], "index"),
    "every other place": (lambda m, z, y: z * torch.arange(0, 2 * len(z), 2).unsqueeze(1), "arange"),
    "the batch's size": (lambda m, z, y: z * len(z), "mul"),
    "its square root": (lambda m, z, y: z.sum() / math.sqrt(len(z)), "div"),
    "targets of the network's": (lambda m, z, y: F.cross_entropy(z, z.argmax(1)), "cross_entropy"),
    "minor rows": (lambda m, z, y: z.t().reshape(-1), "reshape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_the_batch_is_refused(name: str) -> None:
    function, operator = REFUSED[name]
    with pytest.raises(ShardwrightError) as error:
        micro_of(Scored(function), (X.float(), T), 2)
    text = str(error.value)
    assert operator in text.split(":")[0] and "test_microbatch.py:" in text, text
    assert "2 micro-batches" in text and "micro_batches=1" in text, text


def test_what_nothing_depends_on_is_not_refused() -> None:
    def function(m: Scored, z: Tensor) -> Tensor:
        z.detach().amax(0)  # of nobody
        return z.mean()

    assert check(Scored(function), X).joins == (Join("mean"),)


def average(m: Scored, z: Tensor) -> Tensor:
    m.weight = 0.9 * m.weight + 0.1 * z.detach().mean(0)
    return z.mean()


def old_value(m: Scored, z: Tensor) -> Tensor:
    out = (z * m.weight).mean()
    m.weight = m.weight.lerp(z.detach().mean(0), 0.1)
    return out


def total(m: Scored, z: Tensor) -> Tensor:
    m.weight = m.weight / 2 + z.detach().sum(0)
    return z.mean()


def decays(m: Scored, z: Tensor) -> Tensor:
    m.weight.mul_(0.9)
    return (z * m.weight).mean()


def counts(m: Scored, z: Tensor) -> Tensor:
    m.weight = m.weight + 1
    return z.mean()


@pytest.mark.parametrize(
    "function,how", [(average, "mean"), (old_value, "mean"), (total, "sum"), (decays, "same"), (counts, "same")]
)
def test_a_buffer_changes_once_a_step(function: Callable, how: str) -> None:
    assert check(Scored(function), X).updates == {"weight": Join(how)}


def largest(m: Scored, z: Tensor) -> Tensor:
    m.weight = z.detach().amax(0)
    return z.mean()


def first_rows(m: Scored, z: Tensor) -> Tensor:
    m.weight = z.detach()[0]
    return z.mean()


def spread(m: Scored, z: Tensor) -> Tensor:
    m.weight = 0.9 * m.weight + 0.1 * z.detach().var(0)
    return z.mean()


@pytest.mark.parametrize("function", [largest, first_rows, spread])
def test_a_buffer_of_the_whole_batch_is_refused(function: Callable) -> None:
    with pytest.raises(
        ShardwrightError,
        match="(?s)test_microbatch.py:.*the new value of the buffer 'weight'.*a sum or a mean over the",
    ):
        micro_of(Scored(function), (X.float(),), 2)


def test_a_result_of_a_new_value_of_the_whole_batch_is_refused() -> None:
    def function(m: Scored, z: Tensor) -> Tensor:
        m.weight = 0.9 * m.weight + 0.1 * z.detach().mean(0)
        return (z * m.weight).mean()

    with pytest.raises(
        ShardwrightError, match="test_microbatch.py:.*which is reduced over the batch, otherwise than linearly"
    ):
        micro_of(Scored(function), (X.float(),), 2)


def test_a_program_that_depends_on_the_batch_is_refused() -> None:
    def function(m: Scored, z: Tensor) -> Tensor:
        return z.relu().mean() if len(z) > 4 else z.mean()

    with pytest.raises(ShardwrightError, match="depends on the size of the batch"):
        micro_of(Scored(function), (X.float(),), 2)


def test_batches_that_do_not_divide() -> None:
    with pytest.raises(ShardwrightError, match=r"(?s)input 0 has 6 rows, which 4 micro-batches .*legal: 1, 2, 3, 6"):
        micro_calls((numbers(6, 2),), None, 4)
    with pytest.raises(ShardwrightError, match="input y"):
        micro_calls((), {"s": torch.ones(()), "y": numbers(6, 2)}, 4)
    with pytest.raises(ShardwrightError, match="no batch to split"):
        micro_calls((torch.ones(()), 3), None, 2)


def test_which_inputs_are_split() -> None:
    args = (torch.ones(()), {"x": X, "mask": numbers(6, 6)}, 3, T)
    assert is_split(args) == (False, True, False, True)
    (_, held, three, target), kwargs = micro_calls(args, {"y": X[:, 0]}, 4)[0]
    assert [tuple(t.shape) for t in (held["x"], held["mask"], target, kwargs["y"])] == [(2, 6), (6, 6), (2,), (2,)]
    assert three == 3 and held["x"].is_meta and held["x"].dtype == D
    assert micro_calls(args, None, 4)[1][0][1]["x"].shape == (4, 6)
