"""Changes of gradients between backward and step, in processes, where parameters are cut: those of the whole
gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from small_networks import D, draw
from torch import nn

import shardwright as sw

X, Y = draw(8, 6), draw(8, 4, seed=1)


class Net(nn.Module):
    """Two layers; 18 columns, which 4 devices do not divide."""

    def __init__(self, first=torch.matmul, second=torch.matmul) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Parameter(torch.randn(6, 18, dtype=D) / 3), nn.Parameter(torch.randn(18, 4, dtype=D) / 3)
        self.first, self.second = first, second
        self.one, self.two = nn.Identity(), nn.Identity()

    def forward(self, x, y):
        h = self.one(self.first(x, self.a).tanh())
        return F.mse_loss(self.two(self.second(h, self.b)), y)


class Layer(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.w = nn.Parameter(torch.randn(rows, columns, dtype=D) / 3)

    def forward(self, x):
        return (x @ self.w).tanh()


class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = Layer(6, 16), Layer(16, 4)

    def forward(self, x, y):
        return F.mse_loss(self.b(self.a(x)), y)


def rows(p):
    p.grad[:2] = 0


def one_row(p):
    p.grad[1] = torch.arange(p.shape[1], dtype=D)


def last_column(p):
    p.grad[..., -1] = 1.0


def listed(p):
    p.grad[[0, 3]] = 0.5


def masked(p):
    p.grad[p.grad.abs() < 1e-2] = 0


def by_a_plain_mask(p):
    p.grad[torch.arange(p.numel()).view(p.shape) % 3 == 0] = 0


def another(p):
    p.grad[:2] = p.grad[:2] * 2


def row_by_row(p):
    p.grad[0] = p.grad[1] + 1


def times(p):
    p.grad.mul_((torch.arange(p.numel(), dtype=D) % 3).view(p.shape))
    p.grad *= torch.arange(p.shape[1], dtype=D)
    p.grad.masked_fill_(torch.arange(p.shape[0])[:, None] == 2, 0.25)


def copied(p):
    p.grad.copy_(torch.arange(p.numel(), dtype=D).view(p.shape) / 100)


def clamped(p):
    p.grad.clamp_(-1e-2, 1e-2)


def decayed(p):
    p.grad.add_(p.detach(), alpha=0.1)
    p.grad.data.add_(p.data, alpha=0.1)


def normed(p):
    p.grad.div_(p.grad.norm())
    p.grad /= torch.norm(p.grad) + p.grad.abs().max()


def centred(p):
    p.grad.sub_(p.grad.mean(0, keepdim=True))


def noisy(p):
    torch.manual_seed(3)
    p.grad.add_(torch.randn_like(p.grad) * 0.1 + torch.rand_like(p.grad))


CHANGES = [
    rows,
    one_row,
    last_column,
    listed,
    masked,
    by_a_plain_mask,
    another,
    row_by_row,
    times,
    copied,
    clamped,
    decayed,
    normed,
    centred,
    noisy,
]

#: Of stages, whose parameters other ranks have not.
OF_STAGES = [rows, last_column, listed, masked, copied, clamped, decayed]


def trained(model, change, grad_mode):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(X, Y).backward()
        with torch.set_grad_enabled(grad_mode):
            for parameter in model.parameters():
                change(parameter)
        optimizer.step()
    return model


def parallel(how, world):
    if how == "stored in parts":
        return sw.AutoParallel(Net(), parallel_mode="data_parallel").dataset_strategy("full_batch").hsdp(threshold=0)
    if how == "cut by operators":
        net = Net(sw.shard(torch.matmul, ((1, 1), (1, 2))), sw.shard(torch.matmul, ((1, 2), (2, 1))))
        return sw.AutoParallel(net).dataset_strategy("full_batch")
    if how == "cut unevenly":
        net = Net(sw.shard(torch.matmul, ((1, 1), (1, world))), sw.shard(torch.matmul, ((1, 1), (1, world))))
        return sw.AutoParallel(net, uneven=True).dataset_strategy("full_batch")
    model = sw.AutoParallel(Stages()).dataset_strategy("full_batch")
    return model.pipeline(2, micro_batches=2, stage_config={"a": 0, "b": 1})


def refused(model):
    """The errors of changes of parts that are copies."""
    message = []
    model(X, Y).backward()
    for change in (
        lambda g: g[0].mul_(2),
        lambda g: g[0].data.zero_(),
        lambda g: g[0][1:].add_(1),
        lambda g: g.select(0, 1).zero_(),
        lambda g: g.view(-1)[:3].zero_(),
        lambda g: g.narrow(0, 1, 3).detach().fill_(1),
        lambda g: g.T[:, 1].clamp_(0),
    ):
        before = model.a.grad.full_tensor()
        try:
            change(model.a.grad)
            message.append("nothing")
        except sw.SettingError as error:
            message.append(str(error))
        assert torch.equal(model.a.grad.full_tensor(), before)
    with model.no_sync():
        model.zero_grad()
        model(X, Y).backward()
        for change in (rows, another):
            try:
                change(model.a)
                message.append("nothing")
            except sw.SettingError as error:
                message.append(str(error))
    return message


def on_ranks(rank, world, how):
    """The weights after each change: of one model, captured once, that begins with the same weights each time."""
    sw.init()
    out = {}
    model = parallel(how, world)
    model(X, Y)
    begun = [p.detach().clone() for p in model.parameters()]
    for grad_mode in (False, True) if how == "stored in parts" else (False,):
        for change in OF_STAGES if how == "stages" else CHANGES:
            with torch.no_grad():
                for parameter, first in zip(model.parameters(), begun, strict=True):
                    parameter.copy_(first)
            with trained(model, change, grad_mode).whole() as net:
                out[change.__name__, grad_mode] = {n: v.clone() for n, v in net.state_dict().items()}
    return out, refused(parallel(how, world)) if how == "stored in parts" else []


@pytest.mark.parametrize(
    "how, world", [("stored in parts", 2), ("cut by operators", 4), ("cut unevenly", 4), ("stages", 4)]
)
def test_a_change_of_a_gradient_is_one_of_the_whole(how, world):
    expected = {
        change.__name__: trained(Stages() if how == "stages" else Net(), change, False).state_dict()
        for change in (OF_STAGES if how == "stages" else CHANGES)
    }
    for results, message in run_ranks(on_ranks, world, how):
        for (name, _), weights in results.items():
            torch.testing.assert_close(
                weights, dict(expected[name]), rtol=1e-10, atol=1e-12, msg=lambda text: f"{name}: {text}"
            )
        for text in message[:-2]:
            assert "is a copy" in text and "p.grad[:2] = 0" in text
        assert all("no_sync()" in text for text in message[-2:])
    assert how != "stored in parts" or len(message) == 9
