"""Transformers as anyone writes them, on many devices: the same losses and gradients as on one."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import gpt
import llama
import numpy
import pytest
import torch
import torch.nn.functional as F
from language import VOCABULARY, Loss, passages
from one_device import assert_as_one_device, close, parallel
from small_networks import D, draw, labels
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture.export import capture

LENGTH = 8
SPLIT = {2: (1, 2), 4: (2, 2), 8: (2, 4)}  # devices -> parts of the batch, parts of an operator


def gpt_net(**settings: Any) -> nn.Module:
    torch.manual_seed(1)
    return gpt.GPT(length=LENGTH, width=16, heads=4, **settings).to(D)


def llama_net(**settings: Any) -> nn.Module:
    torch.manual_seed(1)
    return llama.Llama(length=LENGTH, width=16, heads=8, kv_heads=4, hidden=24, **settings).to(D)


MODELS = {"gpt": (gpt_net, gpt.mark), "llama": (llama_net, llama.mark)}


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


# -- the examples' models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode", "devices"),
    [  # each two of them together
        (name, ("data_parallel", "semi_auto")[(i + j) % 2], devices)
        for i, name in enumerate(MODELS)
        for j, devices in enumerate(SPLIT)
    ],
)
def test_as_one_device(name: str, mode: str, devices: int) -> None:
    make, mark = MODELS[name]
    net, loss = make(), Loss()
    if mode == "semi_auto":
        mark(net, loss, *SPLIT[devices])
    model = assert_as_one_device(
        net, *passages(8, LENGTH, limit=3), loss_fn=loss, optimizer=adamw, devices=devices, mode=mode
    )
    cut = {n: p.local_shape(0) != p.shape for n, p in model.plan.parameters.items()}
    assert any(cut.values()) == (mode == "semi_auto") and not any(v for n, v in cut.items() if "norm" in n)


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("name", MODELS)
def test_a_few_marks_will_do(name: str, devices: int) -> None:
    net = MODELS[name][0]()
    dp, mp = SPLIT[devices]
    sw.shard(net.blocks[1].up, ((dp, 1, 1), (mp, 1)))  # a module inside a ModuleList
    sw.shard(net.blocks[1].down, ((dp, 1, mp), (1, mp)))
    net.blocks[0].attention.attend.shard(((dp, mp, 1, 1),) * 3)
    if name == "llama":  # the GPT's is the embedding too
        sw.shard(net.head, ((dp, 1, 1), (mp, 1)))
    model = assert_as_one_device(net, *passages(4, LENGTH, limit=2), loss_fn=Loss(), optimizer=adamw, devices=devices)
    assert model.plan.operator("blocks.1.up").in_strategy[:2] == ((dp, 1, 1), (mp, 1))
    assert model.plan.parameters["blocks.1.up.weight"].local_shape(0)[0] == net.blocks[1].up.weight.shape[0] // mp


def test_tied_weights_are_one_parameter() -> None:
    net, loss = gpt_net(), Loss()
    gpt.mark(net, loss, 2, 4)
    tokens, following = next(passages(2, LENGTH))
    plan = sw.plan(net, (tokens,), loss, following, devices=8)
    assert plan.parameters["head.weight"] == plan.parameters["tokens.weight"]
    assert plan.parameters["tokens.weight"].local_shape(0) == (VOCABULARY // 4, 16)
    sums = [c for c in plan.collectives(0) if c.phase == "gradient" and c.shape == (VOCABULARY // 4, 16)]
    assert [c.ranks for c in sums] == [(0, 4)]


def test_tied_weights_that_are_wanted_in_two_layouts_are_an_error() -> None:
    net = gpt_net()
    sw.shard(net.tokens, ((2, 1), (1, 4)))
    sw.shard(net.head, ((2, 1, 1), (4, 1)))
    with pytest.raises(sw.PlanError, match="'tokens.weight'.* wanted in two layouts: tokens .* head"):
        sw.plan(net, (next(passages(2, LENGTH))[0],), devices=8)


@pytest.mark.parametrize("name", MODELS)
def test_a_block_takes_two_sums_forward_and_two_backward(name: str) -> None:
    """The sums are those of tensor parallelism by hand; a block sends nothing else but gradients of parameters."""
    make, mark = MODELS[name]
    tokens, following = next(passages(2, LENGTH))

    def within_blocks(layers: int) -> list[tuple]:
        net, loss = make(layers=layers), Loss()
        mark(net, loss, 2, 4)
        plan = sw.plan(net, (tokens,), loss, following, devices=8)
        of_parameters = {(p.local_shape(5), (1, 5)) for p in plan.parameters.values()}
        return [
            (c.phase, c.op, c.shape, c.ranks)
            for c in plan.collectives(5)
            if c.phase in ("forward", "backward") and (c.phase == "forward" or (c.shape, c.ranks) not in of_parameters)
        ]

    one, two = within_blocks(1), within_blocks(2)
    for phase in ("forward", "backward"):
        added = len([c for c in two if c[0] == phase]) - len([c for c in one if c[0] == phase])
        assert added == 2, phase
    inside = [c for c in two if c not in one or c[2] == (1, LENGTH, 16)]
    assert {c[1:] for c in inside} == {("all_reduce", (1, LENGTH, 16), (4, 5, 6, 7))}


@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_the_same_on_any_number_of_devices(name: str) -> None:
    make, mark = MODELS[name]

    def losses(devices: int, mode: str) -> list[float]:
        net, loss = make(layers=1, dropout=0.3), Loss()
        if mode == "semi_auto":
            mark(net, loss, *SPLIT[devices])
        model = parallel(net, loss, devices=devices, mode=mode)
        optimizer, out = adamw(net.parameters()), []
        torch.manual_seed(5)
        for batch in passages(8, LENGTH, limit=2):
            out.append(model(*batch))
            out[-1].backward()
            optimizer.step(), optimizer.zero_grad()
        return torch.stack(out).detach()

    one = losses(1, "stand_alone")
    plain = next(passages(8, LENGTH))
    assert abs(one[0] - Loss()(make(layers=1)(plain[0]), plain[1])) > 1e-6  # something is dropped
    for devices in (2, 8):
        close(losses(devices, "semi_auto"), one, f"{devices} devices")
        close(losses(devices, "data_parallel"), one, f"{devices} devices")


@pytest.mark.parametrize("module", [gpt, llama], ids=lambda m: m.__name__)
def test_the_scripts_learn_the_same_in_every_mode(module, capsys) -> None:
    settings = [
        "--steps",
        "3",
        "--layers",
        "1",
        "--width",
        "16",
        "--length",
        "16",
        "--dtype",
        "float64",
        "--parallel_mode",
    ]
    losses = {mode: module.main([*settings, mode]) for mode in ("stand_alone", "data_parallel", "semi_auto")}
    losses["two devices"] = module.main([*settings, "semi_auto", "--devices", "2"])
    assert losses["stand_alone"][-1] < losses["stand_alone"][0]
    for mode, found in losses.items():
        close(torch.tensor(found), torch.tensor(losses["stand_alone"]), mode)
    assert capsys.readouterr().out.count("step: 0, loss is 5.") == 4


def test_passages_are_text_and_what_follows_it() -> None:
    (tokens, following), (later, _) = passages(4, 32, seed=3, limit=2)
    assert tokens.shape == following.shape == (4, 32) and torch.equal(tokens[:, 1:], following[:, :-1])
    assert not torch.equal(tokens, later) and torch.equal(tokens, next(passages(4, 32, seed=3))[0])
    assert b" the " in bytes(torch.cat([t for t, _ in passages(16, 64, limit=4)]).flatten().tolist())
    with pytest.raises(ValueError, match="length is 0"):
        next(passages(4, 0))


# -- other ways to write attention -------------------------------------------------------------------------------------


def halves(x: Tensor, angles: Tensor) -> Tensor:
    angles = torch.cat((angles, angles), -1)
    one, two = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-two, one), -1) * angles.sin()


def sliced(x: Tensor, angles: Tensor) -> Tensor:
    middle = x.shape[-1] // 2
    one, two = x[..., :middle], x[..., middle:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def interleaved(x: Tensor, angles: Tensor) -> Tensor:
    angles = angles.repeat_interleave(2, -1)
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * angles.cos() + turned * angles.sin()


def complex_pairs(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def by_expanding(x: Tensor, times: int) -> Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def by_repeating(x: Tensor, times: int) -> Tensor:
    return x.repeat_interleave(times, dim=1)


def with_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhld,bhsd->bhls", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return torch.einsum("bhls,bhsd->bhld", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def with_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.full((q.shape[-2], k.shape[-2]), -torch.inf, dtype=q.dtype).triu(1)
    scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=q.shape[-1] ** -0.5)
    return torch.bmm(F.softmax(scores, -1), v.flatten(0, 1)).unflatten(0, q.shape[:2])


def with_tril(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.tril(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class GroupedAttention(nn.Module):
    """Grouped queries, keys repeated, rotary positions; every piece of it exchangeable."""

    def __init__(self, rotate, repeat, attend) -> None:
        super().__init__()
        self.rotate, self.repeat, self.attend = rotate, repeat, attend
        self.query, self.out = nn.Linear(32, 32, dtype=D), nn.Linear(32, 32, dtype=D)
        self.key, self.value = nn.Linear(32, 16, dtype=D), nn.Linear(32, 16, dtype=D)
        self.register_buffer("inverse", 10.0 ** -torch.arange(0, 1, 0.5, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.query, self.key, self.value))
        angles = torch.einsum("i,j->ij", torch.arange(x.shape[1], device=x.device).type_as(self.inverse), self.inverse)
        q, k = self.rotate(q, angles), self.rotate(k, angles)
        y = self.attend(q, self.repeat(k, 2), self.repeat(v, 2))
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("rotate", "repeat", "attend"),
    [  # each way to repeat with each way to attend
        (halves, by_expanding, with_einsum),
        (sliced, by_repeating, with_einsum),
        (interleaved, by_expanding, with_bmm),
        (complex_pairs, by_repeating, with_bmm),
        (halves, by_expanding, with_tril),
        (complex_pairs, by_repeating, with_tril),
    ],
)
def test_ways_to_write_attention(rotate, repeat, attend) -> None:
    torch.manual_seed(2)
    net = GroupedAttention(rotate, repeat, attend)
    for layer in (net.query, net.key, net.value):
        sw.shard(layer, ((2, 1, 1), (4, 1)))
    sw.shard(net.out, ((2, 1, 4), (1, 4)))
    assert_as_one_device(net, (draw(4, 4, 32),), (draw(4, 4, 32, seed=2),), devices=8)
    assert_as_one_device(copy.deepcopy(net), (draw(4, 4, 32),), devices=4, mode="data_parallel")


class Marked(nn.Module):
    """Attention alone, marked, on three products."""

    def __init__(self, in_strategy: tuple, **settings: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False, dtype=D) for _ in range(3))
        self.attend, self.settings = sw.Operator(F.scaled_dot_product_attention).shard(in_strategy), settings

    def forward(self, x: Tensor) -> Tensor:
        heads = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.attend(*heads, **self.settings)


CUTS = [
    ((2, 4, 1, 1),) * 3,
    ((1, 2, 4, 1), (1, 2, 1, 1), (1, 2, 1, 1)),  # queries
    ((1, 2, 1, 1), (1, 2, 4, 1), (1, 2, 4, 1)),  # keys
    ((1, 1, 2, 2), (1, 1, 2, 2), (1, 1, 2, 1)),  # queries, keys, and the width of the scores
    ((2, 1, 1, 1), (2, 1, 1, 1), (2, 1, 1, 4)),  # the width of the values
]


@pytest.mark.parametrize("in_strategy", CUTS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_whatever_is_cut(in_strategy: tuple, causal: bool) -> None:
    assert_as_one_device(Marked(in_strategy, is_causal=causal), (draw(4, 4, 16),), devices=8)


def test_whatever_is_cut_the_same_weights_are_dropped() -> None:
    x, found = draw(4, 4, 16), []
    for in_strategy in (None, *CUTS):
        torch.manual_seed(2)
        net = Marked(in_strategy, is_causal=True, dropout_p=0.4)
        model = parallel(net, devices=8 if in_strategy else 1, mode="semi_auto" if in_strategy else "stand_alone")
        torch.manual_seed(3)
        got = model(x)
        got.square().sum().backward()
        found.append({"out": got.detach(), **{n: p.grad for n, p in net.named_parameters()}})
    for in_strategy, got in zip(CUTS, found[1:]):
        close(got, found[0], str(in_strategy))
    torch.manual_seed(2)
    assert not torch.allclose(found[0]["out"], Marked(None, is_causal=True)(x))
    assert (found[0]["out"] == 0).all(-1).any()  # the first query sees one key, which is dropped for some


def test_attention_that_is_cut_wrongly_says_what_would_do() -> None:
    with pytest.raises(sw.StrategyError) as raised:
        sw.plan(Marked(((2, 4, 1, 1), (2, 2, 1, 1), (2, 4, 1, 1))), (draw(4, 4, 16),), devices=8)
    text = str(raised.value)
    assert "attend (scaled_dot_product_attention)" in text and "((2, 4, 1, 1), (2, 4, 1, 1), (2, 4, 1, 1))" in text
    assert "test_parallel_transformer_models.py" in text


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_own_transformer(norm_first: bool) -> None:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, F.gelu, batch_first=True, norm_first=norm_first, dtype=D)
    net = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 8, dtype=D))
    sw.shard(net[0].layers[0].linear1, ((2, 1, 1), (4, 1)))
    sw.shard(net[0].layers[0].linear2, ((2, 1, 4), (1, 4)))
    sw.shard(net[1], ((8, 1, 1), (1, 1)))  # a module inside a Sequential
    model = assert_as_one_device(net, (draw(8, 4, 16),), (draw(8, 4, 16, seed=2),), devices=8)
    assert model.plan.operator("0.layers.0.linear1").cause == model.plan.operator("1").cause == "mark"


def test_torchs_own_attention_with_weights_and_masks() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True, dtype=D)

        def forward(self, x: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return self.attention(x, x, x, key_padding_mask=padding, average_attn_weights=False)

    padding = torch.zeros(8, 4, dtype=torch.bool)
    padding[::3, 2:] = True
    torch.manual_seed(4)
    assert_as_one_device(Net(), (draw(8, 4, 16),), devices=8)
    assert_as_one_device(Net(), (draw(8, 4, 16), padding), devices=4, mode="data_parallel")


# -- inputs and outputs of all kinds -----------------------------------------------------------------------------------


@dataclass
class Batch:
    tokens: Tensor
    mask: Tensor | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Output:
    logits: Tensor
    hidden: list[Tensor]
    loss: Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Cache:
    """A plain object, as a cache of keys is."""

    def __init__(self) -> None:
        self.entries, self.name = {}, "cache"


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 16, dtype=D), nn.Linear(16, 8, dtype=D)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(16, dtype=D))

    def forward(self, batch: Batch, *, target: Tensor | None = None, reverse: bool = False) -> Output:
        x = self.table(batch.tokens) * batch.scale
        if batch.mask is not None:
            x = x * batch.mask[..., None]
        if self.training:
            self.seen += 1
            self.average.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        x = x - self.average
        cache = Cache()
        cache.entries["x"] = x
        logits = self.head(x.flip(1) if reverse else x)
        loss = None if target is None else F.cross_entropy(logits.flatten(0, 1), target.flatten())
        return Output(logits, [x, x.sum(-1)], loss, {"cache": cache, "nothing": None, "length": batch.tokens.shape[1]})


@pytest.mark.filterwarnings("ignore::shardwright.RecaptureWarning")
@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto"])
def test_nested_inputs_and_outputs_keywords_and_buffers(mode: str, devices: int) -> None:
    torch.manual_seed(6)
    net = Nested()
    sw.shard(net.head, ((2, 1, 1), (devices // 2, 1)))
    one = copy.deepcopy(net)
    model = parallel(net, devices=devices, mode=mode)
    tokens, target, mask = labels(32, 32).view(8, 4), labels(32, 8, 1).view(8, 4), draw(8, 4).sign()
    calls = [
        (Batch(tokens), {}),
        (Batch(tokens, mask, 0.5), {"target": target}),
        (Batch(tokens, mask), {"target": target, "reverse": True}),
        (Batch(tokens), {"target": None}),
    ]
    for batch, kwargs in calls:
        got, expected = model(batch, **kwargs), one(batch, **kwargs)
        assert type(got) is Output and type(got.extra["cache"]) is Cache and got.extra["cache"].name == "cache"
        close(got.logits, expected.logits)
        close(got.hidden, expected.hidden)
        close(got.loss, expected.loss)
        close(got.extra["cache"].entries, expected.extra["cache"].entries)
        assert got.extra["nothing"] is None and got.extra["length"] == 4
        for output in (got, expected):
            (output.logits.square().mean() if output.loss is None else output.loss).backward()
        close({n: p.grad for n, p in net.named_parameters()}, {n: p.grad for n, p in one.named_parameters()})
        close(dict(net.named_buffers()), dict(one.named_buffers()))
    assert net.seen == 4
    model.eval(), one.eval()
    close(model(Batch(tokens)).logits, one(Batch(tokens)).logits)
    assert net.seen == 4
    model.train(), one.train()
    close(model(Batch(tokens)).logits, one(Batch(tokens)).logits)
    assert net.seen == 5 and len(model._programs) == 5


def test_nested_inputs_and_outputs_can_be_verified() -> None:
    report = sw.verify(Nested(), (Batch(labels(32, 32).view(8, 4), draw(8, 4).sign()),), devices=8, steps=2)
    assert report.ok and report.max_loss_difference < 1e-12 and report.first_difference is None


def test_outputs_that_hold_no_tensors_come_back_as_they_are() -> None:
    class Settings:
        name = "here"

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return [x + 1, None, 3, "s", x.dtype, x.shape, settings, {"device": x.device}]

    settings = Settings()
    got = parallel(Net(), devices=2)(draw(4, 2))
    close(got[0], draw(4, 2) + 1)
    assert got[1:6] == [None, 3, "s", D, (4, 2)] and got[6] is settings and got[7] == {"device": torch.device("cpu")}


@pytest.mark.parametrize(
    ("wrong", "legal"),
    [
        (lambda x: (row for row in x), "as attributes of an object"),
        (lambda x: torch.from_numpy(x.numpy()), "makes a numpy array of a tensor(.|\n)*torch's own operators.*sw.rule"),
        (lambda x: x * float(numpy.asarray(x.detach()).mean()), "makes a numpy array of a tensor"),
        (lambda x: x * x.sum().item(), "do not depend on the values of tensors"),
        (lambda x: x if x.sum() > 0 else -x, "control flow that depends on shapes"),
    ],
)
def test_what_cannot_be_captured_says_where_and_what_to_write(wrong, legal) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return wrong(x)

    with pytest.raises(sw.CaptureError, match=legal) as raised:
        sw.plan(Net(), (draw(4, 2),), devices=2)
    assert raised.value.source.startswith("test_parallel_transformer_models.py:")


def test_evaluation_drops_nothing() -> None:
    net = gpt_net(dropout=0.5)
    tokens = next(passages(8, LENGTH))[0]
    model = parallel(net, devices=8)
    model.train()(tokens)
    close(model.eval()(tokens), copy.deepcopy(net).eval()(tokens))


# -- regions -----------------------------------------------------------------------------------------------------------


class Cast(nn.Module):
    """Autocast inside the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.one(x).softmax(-1)
            with torch.autocast("cpu", enabled=False):
                z = self.two(y.float())
            joined = torch.cat((z, self.two(x)), -1)
        with torch.no_grad():
            scale = joined.abs().amax()
        return joined / scale


def test_autocast_inside_the_model_is_written_out() -> None:
    graph = capture(Cast(), (torch.randn(8, 16),))
    made = [(op.kind, op.outputs[0].dtype) for op in graph.ops]
    linears = [op for op in graph.ops if op.kind == "linear"]
    assert [op.outputs[0].dtype for op in linears] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert [{v.dtype for v in op.inputs} for op in linears] == [{torch.bfloat16}, {torch.float32}, {torch.bfloat16}]
    assert ("softmax", torch.bfloat16) in made and ("cat", torch.float32) in made
    torch.manual_seed(7)
    net, x = Cast(), torch.randn(8, 16)
    one = copy.deepcopy(net)
    got, expected = parallel(net, devices=4)(x), one(x)
    torch.testing.assert_close(got, expected)
    got.sum().backward(), expected.sum().backward()
    torch.testing.assert_close(net.one.weight.grad, one.one.weight.grad, rtol=2e-2, atol=1e-3)


class Mapped(nn.Module):
    """A mask as torch.vmap makes it of a function of two positions, and rows mapped through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        each = lambda row, bias: (row * bias).softmax(-1) + self.layer(row)
        rows = torch.vmap(each, (0, None), 1)(y, self.layer.bias)
        seen = torch.vmap(torch.vmap(lambda i, j: i >= j, (0, None)), (None, 0))(torch.arange(8), torch.arange(8))
        return torch.where(seen, rows.sum(1), 0.0) + y


def test_vmap_is_written_out() -> None:
    torch.manual_seed(8)
    net = Mapped()
    graph = capture(net, (draw(8, 8),))
    assert next(op for op in graph.ops if op.kind == "ge").outputs[0].shape == (8, 8)
    assert all(op.source.startswith("test_parallel_transformer_models.py") for op in graph.ops)
    assert_as_one_device(net, (draw(8, 8),), devices=4)


# -- marks on modules that hold more than one operator -----------------------------------------------------------------


class Turned(nn.Module):
    """One operator between views, its weight stored [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(draw(16, 32)), nn.Parameter(draw(32, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, 16), self.weight).view(*x.shape[:-1], 32)


@pytest.mark.parametrize("in_strategy", [((2, 1), (1, 4)), ((2, 1), (1, 4), (4,))], ids=["without bias", "with bias"])
def test_a_module_of_one_operator_between_views_may_be_marked(in_strategy: tuple) -> None:
    net = nn.Sequential(Turned(), nn.GELU(), nn.Linear(32, 16, dtype=D))
    sw.shard(net[0], in_strategy)  # its input, as the operator sees it, then weight and bias
    sw.shard(net[2], ((2, 1, 4), (1, 4)))
    model = assert_as_one_device(net, (draw(4, 4, 16),), devices=8)
    marked = model.plan.operator("0")
    assert marked.op == "addmm" and marked.in_strategy == ((4,), (2, 1), (1, 4))
    assert model.plan.parameters["0.weight"].local_shape(0) == (16, 8)


def test_a_module_of_several_operators_says_which_ones_may_be_marked() -> None:
    net = gpt_net(layers=1)
    sw.shard(net.blocks[0], ((2, 1, 1),))
    with pytest.raises(sw.CaptureError) as raised:
        sw.plan(net, (next(passages(2, LENGTH))[0],), devices=8)
    text = str(raised.value)
    assert "a mark names one operator; this one holds" in text and "blocks.0" in text
    assert "blocks.0.up (linear)" in text and "blocks.0.attention.out (linear)" in text
