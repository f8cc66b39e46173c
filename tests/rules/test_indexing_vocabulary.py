"""A table and a head cut by vocabulary: nothing of the vocabulary's size is sent, and all is as on one device."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from one_device import assert_as_one_device, close, parallel
from ranks import run_ranks
from small_networks import D, draw, labels
from torch import nn

import shardwright as sw

V, WIDTH, ROWS = 256, 8, 16


class Vocabulary(nn.Module):
    """Look up, one product, scores, loss; the table and the head cut by vocabulary."""

    def __init__(self, cut: int, rows: int, loss, target_cuts: int = 1, dtype: torch.dtype = D) -> None:
        super().__init__()
        self.table = nn.Parameter(draw(V, WIDTH, seed=1).to(dtype))
        self.head = nn.Parameter(draw(V, WIDTH, seed=2).to(dtype))
        self.middle = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.embed = sw.shard(F.embedding, ((rows,), (cut, 1)))
        self.scores = sw.shard(F.linear, ((rows, 1), (cut, 1)))
        target = (rows, cut) if target_cuts == 2 else (rows,)
        self.loss = sw.shard(loss, ((rows, cut), target))

    def forward(self, index: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.middle(self.embed(index, self.table)))
        return self.loss(self.scores(x, self.head), target)


def probabilities(seed: int = 0) -> torch.Tensor:
    return draw(ROWS, V, seed=seed).softmax(1)


LOSSES = {
    "mean": F.cross_entropy,
    "sum": lambda s, t: F.cross_entropy(s, t, reduction="sum"),
    "none": lambda s, t: F.cross_entropy(s, t, reduction="none"),
    "ignore": lambda s, t: F.cross_entropy(s, t, ignore_index=3),
    "smoothing": lambda s, t: F.cross_entropy(s, t, label_smoothing=0.1),
    "probabilities": F.cross_entropy,
}


@pytest.mark.parametrize(("cut", "rows"), [(8, 1), (4, 2), (2, 2)])
@pytest.mark.parametrize("name", LOSSES)
def test_vocabulary_cut(name: str, cut: int, rows: int) -> None:
    soft = name == "probabilities"
    net = Vocabulary(cut, rows, LOSSES[name], target_cuts=1 + soft)
    batches = [(labels(ROWS, V, seed=s), probabilities(s) if soft else labels(ROWS, V, seed=s + 9)) for s in range(2)]
    model = assert_as_one_device(net, *batches)
    assert model.plan.parameters["table"].layout.cuts == (cut, 1)
    for rank in range(8):
        sent = [c for c in model.plan.collectives(rank) if c.operator in ("embed", "scores", "loss")]
        # Of the table and of the scores not even a slice: activations around them, a few numbers a row of the loss.
        assert max(math.prod(c.shape) for c in sent if c.phase != "gradient") <= ROWS * WIDTH < ROWS * V // cut
        assert {c.op for c in sent if c.operator == "loss"} == {"all_reduce"}
        assert max(math.prod(c.shape) for c in sent if c.operator == "loss") <= 4 * ROWS


def test_sums_of_a_loss_travel_together() -> None:
    """The maximum, and one sum of all else; of the mean's two sums one more, over the rows."""
    for loss, completed in ((F.cross_entropy, 2), (lambda s, t: F.cross_entropy(s, t, label_smoothing=0.1), 2)):
        net = Vocabulary(8, 1, loss)
        plan = sw.plan(net, (labels(ROWS, V), labels(ROWS, V)), devices=8)
        mine = [c for c in plan.collectives(3) if c.operator == "loss"]
        assert [c.op for c in mine] == ["all_reduce"] * completed, [(c.shape, c.phase) for c in mine]
        assert {c.phase for c in mine} == {"forward"}
        net = Vocabulary(4, 2, loss)
        plan = sw.plan(net, (labels(ROWS, V), labels(ROWS, V)), devices=8)
        mine = [c for c in plan.collectives(3) if c.operator == "loss"]
        assert [c.op for c in mine] == ["all_reduce"] * (completed + 1), [(c.shape, c.phase) for c in mine]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_sums_in_single(name: str, dtype: torch.dtype) -> None:
    """The loss is as near to the float64 loss of the same numbers as the type of result and gradients allows."""
    soft = name == "probabilities"
    scores = (draw(ROWS, V) * 4).to(dtype).requires_grad_()
    target = probabilities().to(dtype) if soft else labels(ROWS, V)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = sw.shard(LOSSES[name], ((2, 4), (2, 4) if soft else (2,)))

        def forward(self, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return self.loss(s * 1, t)

    made = parallel(Loss())(scores, target)
    exact = scores.detach().double().requires_grad_()
    wanted = LOSSES[name](exact, target.double() if soft else target)
    made.float().sum().backward(), wanted.sum().backward()
    eps = torch.finfo(dtype).eps
    assert made.dtype == dtype
    torch.testing.assert_close(made.double(), wanted, rtol=eps, atol=eps)
    torch.testing.assert_close(scores.grad.double(), exact.grad, rtol=2 * eps, atol=eps / 8)


@pytest.mark.parametrize("cuts", [((1,), (8, 1)), ((1,), (1, 8)), ((2,), (2, 2)), ((8,), (1, 1))], ids=str)
@pytest.mark.parametrize("padding", [None, 3])
def test_embedding(cuts: tuple, padding: int | None) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(draw(V, WIDTH, seed=1))
            self.embed = sw.shard(lambda i, w: F.embedding(i, w, padding_idx=padding), cuts)

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.embed(index, self.table)

    index = labels(ROWS, V)
    index[:4] = 3
    assert_as_one_device(Table(), (index,))


def test_an_index_that_no_rank_holds_is_an_error() -> None:
    net = Vocabulary(8, 1, F.cross_entropy)
    with pytest.raises(RuntimeError, match="out of range: the dim has size 256"):
        parallel(net)(torch.full((ROWS,), V), labels(ROWS, V))
    with pytest.raises(RuntimeError, match="out of range: the dim has size 256"):
        parallel(net)(labels(ROWS, V), torch.full((ROWS,), V))


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda i, w: F.embedding(i, w, sparse=True), "sparse"),
        (lambda i, w: F.embedding_bag(i.view(4, 4), w, mode="sum", sparse=True), "sparse"),
        (lambda i, w: F.embedding(i, w, max_norm=1.0), "in place"),
    ],
    ids=["sparse", "sparse bag", "max_norm"],
)
def test_what_an_embedding_cannot(f, text: str) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(draw(V, WIDTH))

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return f(index, self.table)

    with pytest.raises(sw.ShardwrightError, match=text) as raised:
        sw.plan(Table(), (labels(ROWS, V),), devices=8)
    assert "test_indexing_vocabulary.py" in str(raised.value)


def _in_processes(rank: int, world: int) -> None:
    """The same losses and gradients as in one process; and scans and choices along a cut dim."""
    index, target = labels(ROWS, V), labels(ROWS, V, seed=9)
    sw.init()
    torch.manual_seed(0)
    net = Vocabulary(2, 2, LOSSES["smoothing"])
    one = copy.deepcopy(net)
    loss = sw.AutoParallel(net).dataset_strategy("full_batch")(index, target)
    expected = F.cross_entropy(
        F.linear(torch.tanh(one.middle(F.embedding(index, one.table))), one.head), target, label_smoothing=0.1
    )
    loss.backward(), expected.backward()
    close(loss, expected)
    for (name, mine), theirs in zip(net.named_parameters(), one.parameters()):
        close(mine.grad.full_tensor(), theirs.grad, name)

    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cumsum = sw.shard(lambda x: x.cumsum(1), ((1, 4),))
            self.argmax = sw.shard(lambda x: x.argmax(1), ((1, 4),))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.cumsum(x), self.argmax(x)

    x = draw(4, 8)
    close(sw.AutoParallel(Scan()).dataset_strategy("full_batch")(x), (x.cumsum(1), x.argmax(1)))


def test_in_processes() -> None:
    run_ranks(_in_processes, 4)


def test_what_a_strategy_leaves_over_stands_before_the_rows() -> None:
    """Rows cut 4 ways on 8 devices: neighbours hold different rows. By width, as everywhere, neighbours repeat."""
    for cuts, dim, parts in (
        (((1,), (4, 1)), 0, [0, 1, 2, 3, 0, 1, 2, 3]),
        (((1,), (1, 4)), 1, [0, 0, 1, 1, 2, 2, 3, 3]),
    ):
        net = Vocabulary(8, 1, F.cross_entropy)
        net.embed = sw.shard(F.embedding, cuts)
        layout = sw.plan(net, (labels(ROWS, V), labels(ROWS, V)), devices=8).parameters["table"].layout
        assert [layout.slice((V, WIDTH), r)[dim].start // ((V, WIDTH)[dim] // 4) for r in range(8)] == parts
