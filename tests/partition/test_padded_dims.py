"""Dims that their cuts do not divide: padded, and as on one device, losses and gradients."""

from __future__ import annotations

import copy
import math

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, note, reject, settings
from one_device import assert_as_one_device, close, parallel, squares
from ranks import run_ranks
from small_networks import Apply, D, draw, labels
from test_parallel_random_networks import marked, networks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.errors import PlanError, StrategyError
from shardwright.rules import bound_rule
from shardwright.verification.verify import verify_call

V = 50257


class Layers(nn.Module):
    """A product with a bias, a softmax of what has infinities in its padding, a sum, a product over the same dim."""

    def __init__(self, first: tuple, soft: tuple, total: tuple, width: int = 13) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(draw(width, 6, seed=1)), nn.Parameter(draw(width, seed=3))
        self.v = nn.Parameter(draw(5, width, seed=2))
        self.first, self.soft = sw.shard(F.linear, first), sw.shard(torch.softmax, soft)
        self.total, self.last = sw.shard(torch.sum, total), sw.shard(F.linear, ((1, 8), (1, 8)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x, self.w, self.b)
        z = self.soft(torch.log(y * y), -1)
        return self.total(z * y, -1), self.last(z, self.v), z


@pytest.mark.parametrize(
    ("first", "soft", "total"),
    [
        (((1, 1), (8, 1)), ((1, 8),), ((1, 8),)),
        (((2, 1), (4, 1)), ((1, 8),), ((2, 4),)),
        (((1, 2), (4, 2)), ((8, 1),), ((1, 4),)),  # the softmax cuts another dim, and the sum this one again
        (((8, 1), (1, 1)), ((8, 1),), ((8, 1),)),  # 10 rows on 8 devices
        (((1, 4), (2, 4)), ((2, 4),), ((4, 2),)),  # 6 summed over 4 ways
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [13, 5])  # 5 cut 8 ways: three devices have padding alone
def test_layers(first: tuple, soft: tuple, total: tuple, width: int) -> None:
    net = Layers(first, soft, total, width=width)
    model = assert_as_one_device(net, (draw(10, 6),), (draw(10, 6, seed=5),), uneven=True)
    cut = first[1][0]
    length = -(-width // cut)
    plan = model.plan.parameters["w"]
    assert plan.shape == (width, 6) and plan.layout.cuts == tuple(first[1])
    assert [plan.local_shape(r)[0] for r in range(8)] == [
        max(0, min(length, width - length * plan.layout.position(0, r))) for r in range(8)
    ]
    assert model.plan.operator("first").local_shapes(7)[0][1][0] == length


@pytest.mark.parametrize("rows", [False, True])
def test_what_stands_in_padding_stays_there(rows: bool) -> None:
    """Zeros whose logarithm, and whose gradient, is no number, between operators that all cut one dim alike."""
    cuts, across = ((8, 1), (8, 1)) if rows else ((1, 8), (8, 1))

    def run(m: Apply, x: Tensor) -> tuple[Tensor, ...]:
        x = x @ m.w.abs()  # whose gradient is a sum over the dim
        y = m.log(m.turn(m.first(x, m.v), 0, 1) if not rows else m.first(x, m.v))
        if rows:  # what is summed over rows in the backward: 0 · -inf is no number
            return m.exp(m.last(y, m.v2)), m.total(y, 0)
        return m.last(m.v2, y), m.total(y, 0), m.top(y, 0), m.exp(y)

    net = Apply(
        run,
        first=sw.shard(torch.matmul, ((8, 1), (1, 1)) if rows else ((1, 1), (1, 8))),
        turn=sw.shard(torch.transpose, (cuts,)[:1] if rows else ((1, 8),)),
        log=sw.shard(torch.log, (across,)),
        exp=sw.shard(torch.exp, (across,)),
        last=sw.shard(torch.matmul, ((8, 1), (1, 1)) if rows else ((1, 8), (8, 1))),
        total=sw.shard(torch.sum, (across,)),
        top=sw.shard(torch.amax, (across,)),
    )
    net.v, net.v2 = nn.Parameter(draw(8, 13, seed=1).abs()), nn.Parameter(draw(*((13, 5) if rows else (5, 13)), seed=2))
    assert_as_one_device(net, (draw(10, 8).abs(),), uneven=True)


class Vocabulary(nn.Module):
    """One table that looks up and scores; a loss over its words."""

    def __init__(self, size: int, embed: tuple | None, head: tuple | None, loss: tuple | None, width: int = 4) -> None:
        super().__init__()
        self.size = size
        self.table, self.middle = nn.Parameter(draw(size, width, seed=1)), nn.Linear(width, width, dtype=D)
        self.embed = sw.shard(F.embedding, embed) if embed else F.embedding
        self.head = sw.shard(F.linear, head) if head else F.linear
        self.loss = sw.shard(F.cross_entropy, loss) if loss else F.cross_entropy

    def forward(self, words: Tensor, target: Tensor) -> Tensor:
        x = torch.tanh(self.middle(self.embed(words, self.table)))
        return self.loss(self.head(x, self.table).view(-1, self.size), target.view(-1))


def text(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    words, target = labels(16, size, seed=seed).view(4, 4), labels(16, size, seed=seed + 9).view(4, 4)
    words[0, 0], target[3, 3], target[0, 1] = size - 1, size - 1, 0
    return words, target


@pytest.mark.parametrize(
    ("embed", "head", "loss"),
    [
        (((1, 1), (8, 1)), ((1, 1, 1), (8, 1)), ((1, 8), (1,))),
        (((2, 1), (4, 1)), ((2, 1, 1), (4, 1)), ((2, 4), (2,))),
        (((1, 1), (8, 1)), ((1, 1, 1), (8, 1)), None),  # the loss is unmarked: along its rows
        (None, None, None),
    ],
    ids=str,
)
def test_vocabulary_of_50257_on_8_devices(embed: tuple | None, head: tuple | None, loss: tuple | None) -> None:
    model = assert_as_one_device(Vocabulary(V, embed, head, loss), text(V), text(V, seed=1), uneven=True)
    plan, table = model.plan, model.plan.parameters["table"]
    if head is None:
        assert table.storage.is_replicated
        return
    cut = head[1][0]
    length = math.ceil(V / cut)
    rows = sorted({(table.slice(r)[0].start, table.slice(r)[0].stop) for r in range(8)})
    assert rows == [(i * length, min(V, i * length + length)) for i in range(cut)]
    assert not plan.notes or all("padded" not in message for message in plan.notes)
    if loss is not None:  # nothing of the vocabulary's size is sent
        assert max(math.prod(c.shape) for c in plan.collectives(7) if c.phase != "gradient") <= 16 * 4


class Block(nn.Module):
    """A GPT of one block with one table for looking up and scoring."""

    def __init__(self, attention: tuple | None, size: int = 101, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.size, self.heads = size, heads
        self.table, self.places = nn.Parameter(draw(size, width, seed=1)), nn.Parameter(draw(5, width, seed=2))
        self.before, self.between = nn.LayerNorm(width, dtype=D), nn.LayerNorm(width, dtype=D)
        self.qkv, self.out = nn.Linear(width, 3 * width, dtype=D), nn.Linear(width, width, dtype=D)
        self.up, self.down = nn.Linear(width, 20, dtype=D), nn.Linear(20, width, dtype=D)
        self.embed = sw.shard(F.embedding, ((1, 1), (8, 1)))
        self.head, self.loss = sw.shard(F.linear, ((1, 1, 1), (8, 1))), sw.shard(F.cross_entropy, ((1, 8), (1,)))
        sw.shard(self.up, ((1, 1, 1), (8, 1))), sw.shard(self.down, ((1, 1, 8), (1, 8)))
        attend = F.scaled_dot_product_attention
        self.attend = sw.shard(attend, attention) if attention else attend

    def forward(self, words: Tensor, target: Tensor) -> Tensor:
        x = self.embed(words, self.table) + self.places
        q, k, v = (y.view(*y.shape[:2], self.heads, -1).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.between(x))))
        return self.loss(self.head(x, self.table).view(-1, self.size), target.view(-1))


@pytest.mark.parametrize("attention", [None, ((1, 8, 1, 1),) * 3, ((2, 1, 4, 1), (2, 1, 1, 1), (2, 1, 1, 1))], ids=str)
def test_a_transformer(attention: tuple | None) -> None:
    batch = labels(20, 101).view(4, 5), labels(20, 101, seed=3).view(4, 5)
    assert_as_one_device(Block(attention), batch, uneven=True)


def test_channels() -> None:
    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 5, 3, padding=1, bias=False, dtype=D), nn.BatchNorm2d(5, dtype=D)
            self.last = nn.Conv2d(5, 4, 3, dtype=D)
            sw.shard(self.first, ((1, 1, 1, 1), (4, 1, 1, 1)))
            sw.shard(self.norm, ((1, 4, 1, 1), (4,), (4,), (4,), (4,)))
            sw.shard(self.last, ((1, 4, 1, 1), (1, 4, 1, 1)))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.norm(self.first(x)))).sum((2, 3))

    assert_as_one_device(Convolutions(), (draw(6, 3, 6, 6),), (draw(6, 3, 6, 6, seed=2),), uneven=True, devices=4)


def test_the_plan_shows_padding_and_masks() -> None:
    from shardwright.report.ir_dump import execute_text

    net = Vocabulary(V, ((1, 1), (8, 1)), ((1, 1, 1), (8, 1)), ((1, 8), (1,)))
    plan = sw.plan(net, text(V), devices=8, uneven=True)
    dump = execute_text(plan, 7)
    assert (
        "parameter %table  f64[50257, 4]  layout [8@1, -]  stored [43981:50257, 0:4] = f64[6276, 4], "
        "padded to f64[6283, 4]" in dump
    )
    forward = dump[: dump.index("# backward")]
    assert forward.count("unpadded(") == 1  # one mask of the scores, for the maximum and the sums
    assert plan.parameters["table"].local_shape(0) == (6283, 4) and plan.parameters["table"].local_shape(7) == (6276, 4)
    assert plan.memory(7)["parameters"] == plan.memory(0)["parameters"]


def test_a_dim_that_does_not_divide_is_an_error_otherwise() -> None:
    net = Vocabulary(13, ((1, 1), (8, 1)), ((1, 1, 1), (8, 1)), ((1, 8), (1,)))
    with pytest.raises(StrategyError, match=r"size 13, which does not divide by 8"):
        sw.plan(net, text(13), devices=8)
    with pytest.raises(StrategyError, match=r"size 13, which does not divide by 8"):
        parallel(net)(*text(13))


def test_what_cannot_leave_padding_out_is_an_error() -> None:
    product = Apply(lambda m, x: m.op(x * 1, 1))
    product.op = sw.shard(torch.cumsum, ((1, 4),))
    with pytest.raises(StrategyError, match=r"op .*dims that their cuts do not divide") as caught:
        sw.plan(product, (draw(8, 7),), devices=4, uneven=True)
    assert "(1, 1)" in str(caught.value) and "test_padded_dims.py" in str(caught.value)
    divided = Apply(lambda m, x: m.op(x * 1, m.w))
    divided.op = sw.shard(torch.cdist, ((4, 1), (1, 1)))
    sw.plan(divided, (draw(7, 8),), devices=4, uneven=True)  # rows are nobody else's
    written = Apply(lambda m, x, i: m.op(x * 1, 0, i, m.w[:7]))
    written.op = sw.shard(torch.index_add, ((1, 1), (4,), (4, 1)))
    with pytest.raises(
        StrategyError, match=r"does not divide by 4, and this operator does not leave padding"
    ) as caught:
        sw.plan(written, (draw(12, 8), labels(7, 12)), devices=4, uneven=True)
    assert "((1, 1), (1,), (1, 1))" in str(caught.value)


def test_a_parameter_wanted_in_two_layouts_is_an_error() -> None:
    net = Vocabulary(13, ((1, 1), (8, 1)), ((1, 1, 1), (4, 1)), None)
    with pytest.raises(PlanError, match="'table' .* is wanted in two layouts"):
        sw.plan(net, text(13), devices=8, uneven=True)


def test_a_dim_cut_by_several_digits_is_stored_whole() -> None:
    """Slices in an order that no single digit has are no shards as torch knows them."""
    axes = sw.Layout((2, 2, 2), ("a", "b", "c"))
    net = Apply(lambda m, x: m.op(x, m.v))
    net.v = nn.Parameter(draw(13, 8, seed=4))
    net.op = sw.shard(F.linear, (axes("None", "None"), axes(("c", "a"), "None")))
    model = assert_as_one_device(net, (draw(6, 8),), uneven=True)
    assert model.plan.parameters["v"].storage.is_replicated
    assert any("'v' (13, 8) is stored whole" in message for message in model.plan.notes), model.plan.notes


@pytest.mark.parametrize("out", [((8, 1),), ((1, 8),), ((2, 4),), ((4, 1),)], ids=str)
def test_out_strategies(out: tuple) -> None:
    net = Apply(lambda m, x: torch.tanh(m.op(x, m.v)).sum(1))
    net.v = nn.Parameter(draw(11, 8, seed=4))
    net.op = sw.shard(F.linear, ((2, 1), (4, 1)), out)
    model = assert_as_one_device(net, (draw(6, 8),), (draw(6, 8, seed=1),), uneven=True)
    assert model.plan.operator("op").out_strategy == out


LOSSES = {
    "mean": F.cross_entropy,
    "sum": lambda s, t: F.cross_entropy(s, t, reduction="sum"),
    "none": lambda s, t: F.cross_entropy(s, t, reduction="none"),
    "ignore": lambda s, t: F.cross_entropy(s, t, ignore_index=3),
    "smoothing": lambda s, t: F.cross_entropy(s, t, label_smoothing=0.1),
    "probabilities": F.cross_entropy,
    "mse": torch._C._nn.mse_loss,  # without what broadcasts its operands
    "l1 sum": lambda s, t: torch._C._nn.l1_loss(s, t, 2),
}


@pytest.mark.parametrize("cuts", [(8, 1), (1, 8), (4, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, cuts: tuple[int, int]) -> None:
    soft = name not in ("mean", "sum", "none", "ignore", "smoothing")
    net = Apply(lambda m, x, t: m.op(x @ m.v, t))
    net.v = nn.Parameter(draw(8, 13, seed=4))
    net.op = sw.shard(LOSSES[name], (cuts, cuts if soft else cuts[:1]))
    target = draw(10, 13).softmax(1) if soft else labels(10, 13)
    assert_as_one_device(net, (draw(10, 8), target), uneven=True)


@pytest.mark.parametrize(
    "name",
    ["mean", "var", "amax", "amin", "max", "argmax", "argmin", "norm", "logsumexp", "any", "all", "log_softmax", "std"],
)
@pytest.mark.parametrize("cuts", [(8, 1), (1, 8), (2, 4)], ids=str)
def test_reductions(name: str, cuts: tuple[int, int]) -> None:
    def run(m: Apply, x: Tensor):
        x = torch.log(x @ m.v)  # all that is padded is -inf, and has no gradient
        if name in ("any", "all"):
            return m.op(x > (0.5 if name == "any" else -1e9), 1)
        return m.op(x, 1)

    functions = {"norm": lambda x, d: torch.linalg.vector_norm(x, dim=d), "max": lambda x, d: torch.max(x, d)}
    net = Apply(run)
    net.v = nn.Parameter(draw(8, 13, seed=4).abs() + 0.1)
    net.op = sw.shard(functions.get(name) or getattr(torch, name), (cuts,))
    assert_as_one_device(net, (draw(10, 8).abs() + 0.1,), uneven=True)


def test_integers_and_indices() -> None:
    def run(m: Apply, x: Tensor, words: Tensor) -> tuple[Tensor, ...]:
        found = m.embed(words, m.v)
        return (
            m.gather(found, 0, words.unsqueeze(1).expand(-1, 8) % 9),
            m.hot(words % 5, 5).double() * 2,
            m.most(words * 3, 0),
            m.tri(found @ found.T),
        )

    net = Apply(run)
    net.v = nn.Parameter(draw(13, 8, seed=4))
    net.embed = sw.shard(F.embedding, ((2,), (4, 1)))
    net.gather, net.hot = sw.shard(torch.gather, ((4, 1), (1, 1))), sw.shard(F.one_hot, ((4,),))
    net.most, net.tri = sw.shard(torch.amax, ((8,),)), sw.shard(torch.tril, ((4, 2),))
    assert_as_one_device(net, (draw(9, 8), labels(9, 13)), uneven=True)


def test_random_numbers_are_those_of_one_device() -> None:
    net = Apply(lambda m, x: m.drop(m.op(x, m.v), 0.4, True).tanh().sum(1))
    net.v = nn.Parameter(draw(13, 8, seed=4))
    net.op, net.drop = sw.shard(F.linear, ((1, 1), (4, 1))), sw.shard(F.dropout, ((2, 4),))
    results = []
    for devices in (1, 8):
        torch.manual_seed(5)
        mine = copy.deepcopy(net)
        model = parallel(
            mine,
            devices=devices,
            mode="stand_alone" if devices == 1 else "semi_auto",
            dataset=None if devices == 1 else "full_batch",
            uneven=True,
        )
        out = model(draw(9, 8))
        out.square().sum().backward()
        results.append((out.detach(), mine.v.grad))
    close(*results)
    assert (results[0][0] != 0).any()


def test_verify_and_optimizer_parallel() -> None:
    net = Layers(((2, 1), (4, 1)), ((1, 8),), ((2, 4),), width=13)
    report = verify_call(parallel(net, uneven=True), (draw(10, 6),), devices=8)
    assert report.ok, report.summary()
    assert sw.verify(net, (draw(10, 6),), devices=8, uneven=True, steps=1, dtypes=(D,)).ok
    plan = sw.plan(net, (draw(10, 6),), devices=8, uneven=True, hsdp={"threshold": 0})
    assert plan.parameters["w"].storage.cuts == (4, 1) and plan.parameters["w"].note == "it is padded"
    assert any("'w' (13, 6) is not cut over its replicas: it is padded" in message for message in plan.notes)


def test_the_first_difference_is_found_behind_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.rules import registry

    net = Layers(((1, 1), (8, 1)), ((1, 8),), ((1, 8),), width=13)
    rule = registry._RULES[torch.ops.aten.sum.dim_IntList]
    # A sum that takes what its padding holds: garbage where the operators before left any.
    monkeypatch.setitem(
        registry._RULES, torch.ops.aten.sum.dim_IntList, type(rule)(rule.notation, linear=True, neutral=1)
    )
    report = verify_call(parallel(net, uneven=True), (draw(10, 6),), devices=8)
    assert not report.ok and report.first_difference.operator == "soft", report.summary()


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(networks(rows=(3, 5, 7, 10), sizes=(2, 3, 5, 7)), st.sampled_from([4, 6, 8]), st.data())
def test_random_networks_of_odd_sizes(made, devices, data) -> None:
    net, shape = made
    x, y = (draw(*shape).requires_grad_() for _ in range(2))
    for operator in net.operators:
        operator.shard(())
    graph = capture(net, (x,))
    found = {op.name: bound_rule(op, uneven=True) for op in graph.ops if op.mark is not None}
    for i, operator in enumerate(net.operators):
        strategy = out = None
        if data.draw(st.integers(0, 3)):
            strategy, out = marked(data.draw, found[f"operators.{i}"], devices)
        operator.shard(strategy, out)
        note(f"{net.steps[i]}: {strategy} -> {out}")
    model = parallel(net, devices=devices, uneven=True)
    try:
        got = model(x)
    except StrategyError as error:
        if "do not divide" not in str(error):
            raise
        reject()
    expected = net(y)
    close(got, expected, "outputs")
    if not squares(expected).requires_grad:
        return
    gradients = torch.autograd.grad(squares(expected), [y, *net.parameters()], allow_unused=True)
    close(torch.autograd.grad(squares(got), [x, *net.parameters()], allow_unused=True), gradients, "gradients")


# -- processes ---------------------------------------------------------------------------------------------------------


class Held(Vocabulary):
    """Beside the vocabulary a layer of which the last rank holds nothing, and a bias."""

    def __init__(self) -> None:
        super().__init__(13, None, None, None)
        self.embed = sw.shard(F.embedding, ((1, 1), (4, 1)))
        self.head = sw.shard(F.linear, ((1, 1, 1), (4, 1)))
        self.loss = sw.shard(F.cross_entropy, ((1, 4), (1,)))
        self.wide, self.bias = nn.Parameter(draw(5, 13, seed=8)), nn.Parameter(draw(5, seed=9))
        self.last = sw.shard(F.linear, ((1, 1), (4, 1)))

    def forward(self, words: Tensor, target: Tensor) -> Tensor:
        scores = torch.tanh(self.middle(F.embedding(words.view(-1), self.table.detach()))) @ self.table.detach().T
        return super().forward(words, target) + self.last(scores, self.wide, self.bias).square().mean()


def _steps(rank: int, world: int) -> list[tuple]:
    torch.manual_seed(7)
    one = Held()
    net = copy.deepcopy(one)
    sw.init()
    model = sw.AutoParallel(net, uneven=True).dataset_strategy("full_batch")
    for make in (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, 0.01, fused=True)):
        ours = theirs = None
        for batch in (text(13), text(13, seed=1), tuple(x[:2] for x in text(13, seed=2))):  # the last: another program
            loss, expected = model(*batch), one(*batch)
            ours, theirs = ours or make(net.parameters()), theirs or make(one.parameters())
            close(loss, expected, "loss")
            loss.backward(), expected.backward()
            for n, p in one.named_parameters():
                close(net.get_parameter(n).grad.full_tensor(), p.grad, f"gradient of {n}")
            norms = [nn.utils.clip_grad_norm_(n.parameters(), 0.5) for n in (net, one)]
            close(norms[0].full_tensor() if isinstance(norms[0], DTensor) else norms[0], norms[1], "norm")
            ours.step(), theirs.step()
            ours.zero_grad(), theirs.zero_grad()
            for n, p in one.named_parameters():
                close(net.get_parameter(n).full_tensor(), p.detach(), f"{n} after the step")
    with model.no_sync():
        model(*text(13)).backward()
    model(*text(13, seed=1)).backward()
    one(*text(13)).backward(), one(*text(13, seed=1)).backward()
    for n, p in one.named_parameters():
        close(net.get_parameter(n).grad.full_tensor(), p.grad, f"gradient of {n} in two parts")
    again = sw.AutoParallel(net, uneven=True).dataset_strategy("full_batch")  # of parameters that are cut already
    close(again(*text(13, seed=4)), one(*text(13, seed=4)))
    planned = model.plan.parameters
    return [(n, tuple(p.to_local().shape), planned[n].local_shape(rank)) for n, p in net.named_parameters()]


def test_processes_hold_what_there_is() -> None:
    held = run_ranks(_steps, 4)
    for mine in held:
        assert all(local == planned for _, local, planned in mine)
    rows = [{name: local[0] for name, local, _ in mine} for mine in held]
    assert [r["table"] for r in rows] == [4, 4, 4, 1] and [r["wide"] for r in rows] == [2, 2, 1, 0]
    assert [r["bias"] for r in rows] == [2, 2, 1, 0]
