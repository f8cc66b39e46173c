"""Programs that write into tensors in place, through views too: forward and backward as on one device."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_device import assert_as_one_device, close, parallel, squares
from ranks import run_ranks
from small_networks import Apply, D, draw, labels
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture.export import capture

X = draw(8, 8)
#: Links that cost nothing, beside slow arithmetic: whatever can be cut is.
FREE = sw.Cluster("free links", (sw.Level("link", 4, 1e18, 1e-18),), 1e15, {"float64": 1e6}, 1e6, 1e-15)
IMAGES = draw(4, 8, 8, 2)


# -- as people write them ----------------------------------------------------------------------------------------------


def new_empty(m, x):
    h = x @ m.w
    y = x.new_empty(8, 8)
    y[:, :8] = h
    y[:, torch.tensor([1, 2])] = 0.0
    y[x > 0.5] = 1.0
    y[..., ::2] = h[..., ::2] * 2
    y[0], y[0, 1] = 5, 2.0
    y[:, 1] += 1
    y[None, 2] *= 2
    return y + h


def window_mask(m, x):
    """Swin's: regions are numbered slice by slice."""
    size, window, shift = 8, 4, 2
    mask = torch.zeros((1, size, size, 1), dtype=x.dtype)
    slices = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    count = 0
    for rows in slices:
        for columns in slices:
            mask[:, rows, columns, :] = count
            count += 1
    windows = mask.view(1, 2, window, 2, window, 1).permute(0, 1, 3, 2, 4, 5).reshape(-1, window * window)
    mask = windows.unsqueeze(1) - windows.unsqueeze(2)
    mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
    x = torch.roll(x, (-shift, -shift), (1, 2)).reshape(len(x), -1, 16, 2)
    return torch.softmax(x @ x.mT + mask, -1)


def routing(m, x):
    """DeepSeek-V3's: groups of experts are masked before the best experts are chosen."""
    scores = (x @ m.w).sigmoid()
    choice = scores.detach().view(-1, 4, 2)
    groups = torch.topk(choice.topk(2, -1).values.sum(-1), 2, sorted=False).indices
    mask = torch.zeros(len(x), 4, dtype=x.dtype)
    mask.scatter_(1, groups, 1)
    choice = scores.detach().clone().masked_fill_(~mask.unsqueeze(-1).expand(-1, 4, 2).reshape(-1, 8).bool(), 0.0)
    chosen = torch.topk(choice, 2, sorted=False).indices
    out = scores.new_empty(scores.shape).zero_()
    out.scatter_(1, chosen, scores.gather(1, chosen))
    counts = torch.zeros(8, dtype=torch.long)
    counts.scatter_add_(0, chosen.flatten(), torch.ones(2 * len(x), dtype=torch.long))
    return out, counts


def key_cache(m, x):
    """A buffer that is written a step at a time."""
    with torch.no_grad():
        m.cache[:, m.at : m.at + 1] = (x @ m.w).unsqueeze(1)
        m.seen[m.at] += 1
    return (m.cache * m.w[0]).sum(1) + m.seen.sum()


def static_cache(m, x):
    where = m.seen.argmin().reshape(1)
    m.cache.index_copy_(1, where, (x @ m.w).detach().unsqueeze(1))
    m.seen.index_fill_(0, where, 1)
    return torch.tanh(x @ m.w).unsqueeze(1) @ m.cache.mT


def ring_buffer(m, x):
    with torch.no_grad():
        m.cache[:, 1:] = m.cache[:, :-1].clone()
        m.cache[:, 0].copy_(x)
        m.seen.add_(1).clamp_(max=3)
    return x @ m.w * m.cache.mean(1)


def running_mean(m, x):
    h = x @ m.w
    with torch.no_grad():
        m.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        m.average[0] = 1.0
    return h - m.average


def stale_view(m, x):
    y = x @ m.w
    row = y.view(-1)
    y.relu_()
    return row * 2


def through_views(m, x):
    h = x @ m.w
    y = h * 1
    left, right = y.mT, y.flatten()
    left.mul_(2)
    right[3:20:2].mul_(3)
    y.diagonal().fill_(2.0)
    y.permute(1, 0).unsqueeze(0).select(2, 3).add_(h[0])
    y.unflatten(1, (2, 4))[:, 1, 2:].narrow(1, 1, 1).zero_()
    y.T[1:, -1] = h[0, 1:]
    return y, left * h, right


def parts(m, x):
    y = torch.tanh(x)
    a, b = y.chunk(2, 1)
    b.zero_()
    y.split([1, 7], 1)[0].add_(3)
    for i, row in enumerate(y.unbind(1)):
        row += i
    y.tensor_split(3, 1)[2].mul_(2)
    return y @ m.w + a.sum()


def under_no_grad(m, x):
    h = x @ m.w
    with torch.no_grad():
        h.mul_(2)  # the gradient does not see it
        mask = torch.zeros(8, 8, dtype=D)
        mask[:, 2] = 1
        soft = torch.tanh(h)
        soft[:, 1] = 0
        h[0] = soft[1]
    h.detach().add_(0.5)
    return h * mask + soft


def no_grad_views_stay_views(m, x):
    h = torch.zeros(8, 8, dtype=D)
    with torch.no_grad():
        row = h[2]
    h[2] = x[2] * 3
    return row + x @ m.w


def other_types(m, x):
    z = torch.zeros(8, 8, dtype=torch.complex128)
    z.real.copy_(x @ m.w)
    z.imag[:, 3] = 2 * x[:, 1]
    torch.view_as_real(z)[:, 5, 1] = 4
    places = torch.arange(8)
    places[2:] += 3
    places.clamp_(max=7)
    flags = x > 0
    flags |= x < -1
    flags[0] &= False
    flags.logical_not_()
    low = (x @ m.w).float()
    low.add_(x).mul_(flags)  # computed in float64 and rounded
    low[:, 0] = x[:, 0]
    return z.abs()[:, places], flags, low.double()


def out_arguments(m, x):
    h = torch.empty_like(x)
    torch.mm(x, torch.ones(8, 8, dtype=D), out=h)
    torch.add(h, 1, out=h[:])
    top, at = x.new_empty(8), torch.empty(8, dtype=torch.long)
    torch.max(h, 1, out=(top, at))
    return h @ m.w, top, at


def turned_in_place(m, x):
    h = (x @ m.w).unsqueeze_(0)
    row = h[0]
    h.squeeze_(0).t_()
    h[1] = 3.0
    h.fill_diagonal_(1)
    return h.transpose_(0, 1), row


def returned_itself(m, x):
    h = x @ m.w
    for same in (F.dropout(h, training=False), h.contiguous(), h.to(D), h.view(8, 8), h.expand(8, 8), h.reshape(-1)):
        same.mul_(1.5)
    copied = h.mT.reshape(-1)
    copied.mul_(0.0)
    return h, copied


def in_a_loop(m, x):
    out = torch.zeros(8, 4, 8, dtype=D)
    state = x
    for i in range(4):
        state = torch.tanh(state @ m.w)
        out[:, i] = state
        out[:, i, ::3] += x[:, ::3]
    return out.flatten(1)


def index_writes(m, x):
    h = x @ m.w
    y = h.clone()
    y.index_put_((torch.tensor([0, 1, 0]),), x[:3], accumulate=True)
    y.index_add_(1, torch.tensor([2, 3]), h[:, :2])
    y.index_copy_(0, torch.tensor([4, 5]), x[:2])
    y.masked_fill_(y > 3, 0.0)
    y.masked_scatter_(x > 1, h.flatten())
    y.scatter_(1, torch.zeros(8, 1, dtype=torch.long), 1.0)
    y[torch.arange(8), torch.arange(8)] = h.sum(1)
    return y


def behind_the_batch(m, x):
    y = (x @ m.w).unsqueeze(0)
    z = y * 1
    z[:, :, torch.tensor([0, 1])] = 5.0
    return z, y[:, :, torch.tensor([1, 0, 1])]


def data_is_detached(m, x):
    h = x @ m.w
    h.data.clamp_(-1, 1)
    low = h.data
    low[:, 1] = m.w.data[0]
    return h + low * x.data


def recomputed(m, x):
    def block(h):
        h = h * 2
        h[:, 1:3] = h[:, 3:5].clone()
        return torch.tanh(h @ m.w)

    return torch.utils.checkpoint.checkpoint(block, x @ m.w, use_reentrant=False)


PROGRAMS = [
    new_empty,
    routing,
    key_cache,
    static_cache,
    ring_buffer,
    running_mean,
    stale_view,
    through_views,
    parts,
    under_no_grad,
    no_grad_views_stay_views,
    other_types,
    out_arguments,
    turned_in_place,
    returned_itself,
    in_a_loop,
    index_writes,
    behind_the_batch,
    data_is_detached,
    recomputed,
]


def buffers() -> dict[str, Any]:
    return dict(
        cache=torch.zeros(8, 3, 8, dtype=D),
        seen=torch.zeros(3, dtype=torch.long),
        at=1,
        average=torch.zeros(8, dtype=D),
    )


@pytest.mark.parametrize("f", PROGRAMS)
def test_as_one_device(f: Callable) -> None:
    model = assert_as_one_device(Apply(f, **buffers()), (X,), (draw(8, 8, seed=4),), devices=4)
    assert any(cut > 1 for op in model.plan.operators for layout in op.out_layouts for cut in layout.cuts)
    assert not any(
        getattr(op.target, "_schema", None) is not None and op.target._schema.is_mutable
        for op in capture(Apply(f, **buffers()), (X,)).ops
    )


def test_swins_windows() -> None:
    assert_as_one_device(Apply(window_mask), (IMAGES,), devices=4)


@pytest.mark.long
@pytest.mark.parametrize("library", ["torchvision", "transformers"])
def test_swin(library: str) -> None:
    """Shifted windows, whose masks are written slice by slice."""
    module = pytest.importorskip(library)
    torch.manual_seed(0)
    sizes = {"embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4]}
    if library == "torchvision":
        net = module.models.SwinTransformer(
            [4, 4], window_size=[4, 4], stochastic_depth_prob=0.0, num_classes=8, **sizes
        )
    else:
        net = Logits(
            module.SwinForImageClassification(
                module.SwinConfig(image_size=32, patch_size=4, window_size=4, num_labels=8, drop_path_rate=0.0, **sizes)
            )
        )
    model = assert_as_one_device(net.to(D), (draw(4, 3, 32, 32), labels(4)), loss_fn=nn.CrossEntropyLoss(), devices=4)
    operators = model.plan.operators
    assert sum(layout.cuts[0] == 4 for op in operators for layout in op.out_layouts if layout.cuts) > len(operators) / 2


class Logits(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).logits


def test_dims_that_are_not_written_in_part_stay_cut() -> None:
    """Nothing is sent for the sake of a write."""

    def f(m, x):
        y = x.new_zeros(8, 3, 8)
        y[:, 1:] = x.unsqueeze(1)
        y[:, 0, ::2] = 1.0
        y[:, :, torch.tensor([1, 2])] = 0.0
        y.select(1, 2).mul_(x)
        y.diagonal(0, 1, 2).fill_(3.0)
        return y

    plan = sw.plan(Apply(f), (X,), devices=4, parallel_mode="data_parallel", dataset_strategy="data_parallel")
    writes = [op for op in plan.operators if "scatter" in op.op or op.op == "index_put"]
    assert len(writes) >= 5 and all(op.out_layouts[0].cuts[0] == 4 for op in writes)
    assert not plan.collectives(0)


# -- random programs ---------------------------------------------------------------------------------------------------


def _view(rng: random.Random, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """A view of a tensor of that shape."""
    d = rng.randrange(len(shape))
    size = shape[d]
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda t, a=rng.randrange(size), n=rng.randint(1, 3): t.narrow(d, a, min(n, size - a)),
        lambda t, a=rng.randint(-size, size - 1), s=rng.randint(1, 3): t[(slice(None),) * d + (slice(a, None, s),)],
        lambda t: t.unsqueeze(d),
        lambda t: t.flatten(),
        lambda t: t.transpose(0, d),
        lambda t: t.movedim(d, -1),
        lambda t, i=rng.randrange(3): t.chunk(3, d)[min(i, len(t.chunk(3, d)) - 1)],
        lambda t: t.view(*t.shape[:d], 1, *t.shape[d:]),
        lambda t: t.squeeze(),
        lambda t: t.detach(),
    ]
    if len(shape) > 1:
        ways += [
            lambda t, i=rng.randrange(size): t.select(d, i),
            lambda t, i=rng.randrange(size): t.unbind(d)[i],
            lambda t: t.diagonal(0, 0, 1),
        ]
    if size % 2 == 0:
        ways.append(lambda t: t.unflatten(d, (2, size // 2)))
    return rng.choice(ways)


def _write(rng: random.Random, other: Callable[[list[Tensor]], Tensor]) -> Callable[[list[Tensor], Tensor], Any]:
    """A write into a tensor of any shape."""
    c, d = rng.choice([-1.5, 0.5, 2.0]), rng.randrange(3)

    def alike(values: list[Tensor], t: Tensor) -> Tensor:
        """Elements of another tensor, copied, in the shape of this one."""
        return other(values).flatten().repeat(t.numel())[: t.numel()].view(t.shape)

    def some(values: list[Tensor], t: Tensor) -> None:
        t[(slice(None),) * min(d, t.dim() - 1) + (torch.tensor([0, t.shape[min(d, t.dim() - 1)] - 1]),)] = c

    return rng.choice(
        [
            lambda values, t: t.add_(c),
            lambda values, t: t.mul_(c),
            lambda values, t: t.zero_(),
            lambda values, t: t.fill_(c),
            lambda values, t: t.sin_(),
            lambda values, t: t.clamp_(-1, 1),
            lambda values, t: t.masked_fill_(t > 0.3, c),
            lambda values, t: t.copy_(alike(values, t)),
            lambda values, t: t.add_(alike(values, t)),
            lambda values, t: t.copy_(alike(values, t).sum()),
            lambda values, t: t.__setitem__(t < 0, c),
            some,
            lambda values, t: t.index_fill_(0, torch.tensor([0]), c),
        ]
    )


def random_program(seed: int) -> Callable[[Apply, Tensor], list[Tensor]]:
    """Views of a few tensors, writes into any of them, some of those unseen by autograd."""
    rng = random.Random(seed)
    shapes = [t.shape for t in (X, X, X.new_zeros(8, 2, 4))]
    steps: list[Callable[[list[Tensor]], Any]] = []
    for _ in range(rng.randint(4, 12)):
        i = rng.randrange(len(shapes))
        if rng.random() < 0.45 and shapes[i] and all(shapes[i]):
            take = _view(rng, shapes[i])
            shapes.append(take(torch.zeros(shapes[i])).shape)
            steps.append(lambda values, i=i, take=take: values.append(take(values[i])))
        elif len(shapes[i]) and all(shapes[i]):
            j = rng.randrange(len(shapes))
            write = _write(rng, lambda values, j=j if all(shapes[j]) else 0: values[j].clone())
            if rng.random() < 0.2:
                steps.append(lambda values, i=i, write=write: torch.no_grad()(write)(values, values[i]))
            else:
                steps.append(lambda values, i=i, write=write: write(values, values[i]))

    def f(m: Apply, x: Tensor) -> list[Tensor]:
        values = [x @ m.w, x.clone(), x.new_zeros(8, 2, 4)]
        for step in steps:
            step(values)
        return [v * (i + 1) for i, v in enumerate(values)]

    return f


def run(f: Callable, x: Tensor) -> tuple[Any, Any] | None:
    """Outputs and gradient on one device; None where torch refuses the program."""
    net = Apply(f)
    try:
        outputs = net(x.clone())
        loss = squares(outputs)
        if loss.requires_grad:
            loss.backward()
    except RuntimeError:
        return None
    return outputs, net.w.grad


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_random_programs(first: int) -> None:
    checked = 0
    for seed in range(first, first + 20):
        expected = run(random_program(seed), X)
        if expected is None:
            continue
        net = Apply(random_program(seed))
        options = {} if seed % 3 else {"mode": "recursive_programming", "cluster": FREE}  # cuts all dims, or the batch
        outputs = parallel(net, devices=4, **options)(X.clone())
        close(outputs, expected[0], f"program {seed}")
        loss = squares(outputs)
        if loss.requires_grad:
            loss.backward()
        close(net.w.grad, expected[1], f"gradient of program {seed}")
        checked += 1
    assert checked > 6


# -- what outlives a call ----------------------------------------------------------------------------------------------


class Greedy(nn.Module):
    """Changes its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, dtype=D), nn.Linear(8, 8, dtype=D)
        for p in self.parameters():
            nn.init.normal_(p, generator=torch.Generator().manual_seed(p.dim()))

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        x += 1
        x[:, ::3] = 0.0
        flags[:, 1] |= x[:, 0] > 1
        x = x * x
        return self.second(torch.tanh(self.first(x))) * flags


def greedy_inputs(rows: int = 8) -> tuple[Tensor, Tensor]:
    return draw(rows, 8, seed=3), labels(rows * 8, 2).view(rows, 8).bool()


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "semi_auto"])
def test_inputs_that_the_model_changes_are_changed(mode: str, tmp_path: Any) -> None:
    net = Greedy()
    one = copy.deepcopy(net)
    model = parallel(net, devices=1 if mode == "stand_alone" else 4, mode=mode)
    mine, yours = greedy_inputs(), greedy_inputs()
    for _ in range(2):  # the second call goes on from there
        got, expected = model(*mine), one(*yours)
        close((got, mine), (expected, yours))
        squares(got).backward(), squares(expected).backward()
    close([p.grad for p in net.parameters()], [p.grad for p in one.parameters()])
    again = sw.plan(net, greedy_inputs(), devices=4, parallel_mode="data_parallel")
    again.save(tmp_path / "plan.json")
    assert sw.Plan.load(tmp_path / "plan.json").graph.changed == again.graph.changed == (0, 1)
    assert sw.verify(Greedy(), greedy_inputs(), devices=4, parallel_mode="data_parallel").ok


def changed_on_ranks(rank: int, world: int) -> None:
    net = Greedy()
    one = copy.deepcopy(net)
    model = sw.AutoParallel(net, parallel_mode="data_parallel")
    mine, yours = [x[4 * rank : 4 * rank + 4].clone() for x in greedy_inputs()], greedy_inputs()
    got, expected = model(*mine), one(*yours)
    close((got, mine), (expected[4 * rank : 4 * rank + 4], [x[4 * rank : 4 * rank + 4] for x in yours]))


def test_each_rank_gets_back_the_part_that_it_fed() -> None:
    run_ranks(changed_on_ranks, 2)


def test_a_pipeline_changes_its_inputs_too() -> None:
    net, loss_fn = Greedy(), nn.MSELoss()

    class Both(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return loss_fn(output, target)

    one = copy.deepcopy(net)
    model = parallel(net, Both(), devices=4).pipeline(stages=2, micro_batches=2, stage_config={"first": 0, "second": 1})
    mine, yours = greedy_inputs(), greedy_inputs()
    got, expected = model(*mine, X), loss_fn(one(*yours), X)
    close((got, mine), (expected, yours))
    got.backward(), expected.backward()
    close([p.grad for p in net.parameters()], [p.grad for p in one.parameters()])


# -- what cannot be followed -------------------------------------------------------------------------------------------


def resized(m, x):
    y = x.clone()
    y.resize_(4, 16)
    return y.view(8, 8) @ m.w


def set_to_another(m, x):
    y = x.clone()
    y.set_(x)
    return y @ m.w


def windows(m, x):
    y = x.clone()
    y.unfold(0, 2, 2)[0].fill_(1.0)
    return y @ m.w


def strided(m, x):
    y = x.clone()
    y.as_strided((4, 4), (16, 2)).zero_()
    return y @ m.w


def one_place_many_times(m, x):
    y = x.clone()
    y.expand(2, 8, 8)[0].add_(1)
    return y @ m.w


def wider_type(m, x):
    y = x.clone()
    y.view(torch.complex128).zero_() if y.dtype == torch.float64 else None
    return y @ m.w


def behind_its_back(m, x):
    y = x @ m.w
    y.data = y * 2
    return y


def plain_attribute(m, x):
    m.plain[0].add_(1)
    return x @ m.w + m.plain


def weight_part(m, x):
    with torch.no_grad():
        m.w[0].zero_()
    return x @ m.w


def weight_view(m, x):
    m.w.detach().T.mul_(2)
    return x @ m.w


def by_value(m, x):
    y = x @ m.w
    y[int(x.argmax())] = 0.0
    return y


def as_many_as_there_are(m, x):
    y = x @ m.w
    y[x > 0] = x[x > 0]
    return y


def every_other(m, x):
    y = [x @ m.w, x * 1]
    torch._foreach_mul_(y, 2.0)
    return y[0] + y[1]


def wrapped_diagonal(m, x):
    y = torch.cat([x, x])
    y.fill_diagonal_(1.0, wrap=True)
    return y @ m.w


def sparse(m, x):
    y = (x @ m.w).to_sparse()
    y.mul_(2)
    return y.to_dense()


ODD = [
    resized,
    set_to_another,
    windows,
    strided,
    one_place_many_times,
    wider_type,
    behind_its_back,
    plain_attribute,
    weight_part,
    weight_view,
    by_value,
    as_many_as_there_are,
    every_other,
    wrapped_diagonal,
    sparse,
]


@pytest.mark.parametrize("f", ODD)
def test_odd_programs_are_followed_or_an_error_with_the_line(f: Callable) -> None:
    """Nothing else: no other exception, and no other numbers."""
    net = Apply(f, plain=None)
    net.__dict__["plain"] = torch.zeros(8, dtype=D)
    try:
        assert_as_one_device(net, (X,), devices=4)
    except sw.ShardwrightError as error:
        first = f.__code__.co_firstlineno
        file, line = error.source.rsplit(":", 1)
        assert file == "test_mutation.py" and first < int(line) < first + 8 and error.legal, error
        return
    assert f in FOLLOWED


FOLLOWED: list[Callable] = []


@pytest.mark.parametrize(
    ("f", "message", "legal"),
    [
        (weight_part, "parameter 'w' in place", "outside of the model's forward"),
        (weight_view, "parameter 'w' in place", "outside of the model's forward"),
        (plain_attribute, "net.plain, a plain tensor of shape", "register_buffer"),
        (windows, "no way back", "clone"),
        (one_place_many_times, "no way back", "clone"),
        (resized, "resize_", "returns its result"),
    ],
)
def test_errors_of_writes(f: Callable, message: str, legal: str) -> None:
    net = Apply(f, plain=None)
    net.__dict__["plain"] = torch.zeros(8, dtype=D)
    with pytest.raises(sw.CaptureError, match=message) as raised:
        capture(net, (X,))
    assert legal in raised.value.legal


def written_on_ranks(rank: int, world: int) -> None:
    for f in (new_empty, key_cache, through_views, under_no_grad, index_writes):
        net = Apply(f, **buffers())
        one = copy.deepcopy(net)
        model = sw.AutoParallel(net, parallel_mode="data_parallel").dataset_strategy("full_batch")
        for _ in range(2):
            got, expected = model(X.clone()), one(X.clone())
            close(got, expected, f.__name__)
            squares(got).backward(), squares(expected).backward()
        for mine, yours in ((net.w.grad, one.w.grad), (net.cache, one.cache)):
            close(mine.full_tensor() if hasattr(mine, "full_tensor") else mine, yours, f.__name__)


def test_in_processes() -> None:
    run_ranks(written_on_ranks, 2)
