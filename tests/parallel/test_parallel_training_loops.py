"""The training loop as users have it: every kind of optimizer, schedulers, scaling, half precision, accumulation."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn

import shardwright as sw

DEVICES = 4


class Net(nn.Module):
    """Two products with a norm between them; a bias, so that parameters are of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(F.gelu(self.norm(self.up(x))))


def net(dtype=torch.float64) -> Net:
    torch.manual_seed(0)
    made = Net().to(dtype)
    sw.shard(made.up, ((2, 1), (2, 1), (2,)))
    sw.shard(made.down, ((2, 2), (1, 2), (1,)))
    return made


def batches(count: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(8, 12, dtype=dtype, generator=generator), torch.randint(0, 4, (8,), generator=generator)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


def train(model, parameters, optimizer, steps=4, clip=None, schedule=None, dtype=torch.float64):
    """The losses of a loop; `model` gives the loss."""
    made = OPTIMIZERS[optimizer](parameters)
    scheduler = schedule(made) if schedule else None
    losses = []
    for x, y in batches(steps, dtype):
        loss = model(x, y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        made.step()
        made.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def alone(plain):
    return lambda x, y: F.cross_entropy(plain(x), y)


def parallel(made, devices=DEVICES, **settings):
    sw.init(devices=devices)
    return sw.AutoParallel(made, nn.CrossEntropyLoss(), **settings).dataset_strategy("full_batch")


def close(got, expected, tolerance=1e-12):
    assert len(got) == len(expected) and all(abs(a - b) <= tolerance * max(1, abs(b)) for a, b in zip(got, expected)), (
        got,
        expected,
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer):
    plain, model = net(), parallel(net())
    close(train(model, list(model.parameters()), optimizer), train(alone(plain), list(plain.parameters()), optimizer))


def every_optimizer(rank, world):
    out = {}
    model = sw.AutoParallel(net(), nn.CrossEntropyLoss()).dataset_strategy("full_batch")
    model(*next(batches(1)))
    begin = [p.to_local().clone() for p in model.parameters()]
    for optimizer in OPTIMIZERS:
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), begin):
                parameter.to_local().copy_(values)
        try:
            out[optimizer] = train(model, list(model.parameters()), optimizer, clip=0.05)
        except Exception as error:
            out[optimizer] = f"{type(error).__name__}: {error}"
    return out


def test_optimizers_on_slices():
    results = run_ranks(every_optimizer, DEVICES)
    expected = {}
    for optimizer in OPTIMIZERS:
        plain = net()
        expected[optimizer] = train(alone(plain), list(plain.parameters()), optimizer, clip=0.05)
    for _rank, result in enumerate(results):
        for optimizer, losses in result.items():
            assert not isinstance(losses, str), (optimizer, losses)
            close(losses, expected[optimizer])


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=4),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
            ],
            [2],
        ),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    ],
    ids=["cycle", "sequence", "lambda"],
)
def test_schedulers(schedule):
    plain, model = net(), parallel(net())
    close(
        train(model, list(model.parameters()), "SGD", schedule=schedule),
        train(alone(plain), list(plain.parameters()), "SGD", schedule=schedule),
    )


def accumulated(model, parameters, dtype=torch.float64):
    """Four batches a step, one of them larger gradients than the clip allows."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for i, (x, y) in enumerate(batches(8, dtype)):
        loss = model(x, y) / 4
        loss.backward()
        losses.append(loss.item())
        if i % 4 == 3:
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_accumulated_gradients():
    plain, model = net(), parallel(net())
    close(accumulated(model, list(model.parameters())), accumulated(alone(plain), list(plain.parameters())))


def scaled(model, parameters, poison=()):
    """With a scaler of losses; the steps whose numbers are in `poison` have an infinite loss, and are left out."""
    optimizer, scaler = (
        torch.optim.SGD(parameters, lr=0.1),
        torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2),
    )
    losses = []
    for i, (x, y) in enumerate(batches(6)):
        loss = model(x, y)
        scaler.scale(loss * float("inf") if i in poison else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, scaler.get_scale()


@pytest.mark.parametrize("poison", [(), (2,)], ids=["finite", "an infinite gradient"])
def test_scaled_losses(poison):
    plain, model = net(), parallel(net())
    got, expected = (
        scaled(model, list(model.parameters()), poison),
        scaled(alone(plain), list(plain.parameters()), poison),
    )
    close(got[0], expected[0])
    assert got[1] == expected[1]


def scaled_on_slices(rank, world):
    model = sw.AutoParallel(net(), nn.CrossEntropyLoss()).dataset_strategy("full_batch")
    model(*next(batches(1)))
    return scaled(model, list(model.parameters()), (2,))


def test_scaled_losses_on_slices():
    plain = net()
    expected = scaled(alone(plain), list(plain.parameters()), (2,))
    for losses, scale in run_ranks(scaled_on_slices, DEVICES):
        close(losses, expected[0])
        assert scale == expected[1]


def test_half_precision_parameters():
    """The same types everywhere; half of the bits make it alike to a few units of its last place."""
    plain, model = net(torch.bfloat16), parallel(net(torch.bfloat16))
    got = train(model, list(model.parameters()), "SGD", dtype=torch.bfloat16)
    close(got, train(alone(plain), list(plain.parameters()), "SGD", dtype=torch.bfloat16), 3e-2)
    assert all(p.grad is None and p.dtype == torch.bfloat16 for p in model.parameters())


class Casting(Net):
    """A part of the model under autocast."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.norm(self.up(x))
        return self.down(F.gelu(x).to(self.down.weight.dtype))


def test_autocast_inside():
    torch.manual_seed(0)
    plain = Casting().double()
    model = parallel(copy.deepcopy(plain))
    got = train(model, list(model.parameters()), "SGD", steps=1)
    close(got, train(alone(plain), list(plain.parameters()), "SGD", steps=1), 1e-2)


@pytest.mark.parametrize("within", [False, True], ids=["the call", "the step"])
def test_autocast_outside(within):
    """Products in half precision, their sums too, the loss in float32."""
    plain = net(torch.float32)
    model = parallel(net(torch.float32))

    def cast(run):
        def loss(x, y):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return run(x, y)

        return loss

    whole = train(model, list(model.parameters()), "SGD", dtype=torch.float32)
    model = parallel(net(torch.float32))
    got = train(cast(model), list(model.parameters()), "SGD", dtype=torch.float32)
    expected = train(cast(alone(plain)), list(plain.parameters()), "SGD", dtype=torch.float32)
    close(got, expected, 1e-2)
    assert got[0] != whole[0], "autocast did nothing"


def test_autocast_is_part_of_the_program():
    """The same model called with and without autocast is two programs."""
    model = parallel(net(torch.float32))
    x, y = next(batches(1, torch.float32))
    first = model(x, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        second = model(x, y)
        assert model.plan.operator("up").dtypes != () and first != second
    assert model(x, y) == first


def compiled_losses(rank, world):
    model = sw.AutoParallel(net(), nn.CrossEntropyLoss(), compile="aot_eager").dataset_strategy("full_batch")
    model(*next(batches(1)))
    return train(model, list(model.parameters()), "AdamW")


def test_compiled_on_slices():
    # What a compiled forward and backward import is imported once here, and not in every rank.
    torch.compile(torch.relu, backend="aot_eager")(torch.ones(1, requires_grad=True))
    plain = net()
    expected = train(alone(plain), list(plain.parameters()), "AdamW")
    for losses in run_ranks(compiled_losses, DEVICES):
        close(losses, expected, 1e-10)


def test_compiled_on_one_device():
    """Without the processor's vectors, of which torch would compile a program for each kind, to see whether it runs."""
    from torch._inductor import config  # imports the compiler, which other tests do without

    plain = net()
    model = sw.AutoParallel(net(), nn.CrossEntropyLoss(), "stand_alone", compile=True)
    with config.patch({"cpp.vec_isa_ok": False}):
        got = train(model, list(model.parameters()), "AdamW")
    close(got, train(alone(plain), list(plain.parameters()), "AdamW"), 1e-10)
    assert len(model.plan.operators) > 3


def test_what_is_not_compiled_is_said():
    model = parallel(net(), compile=True)
    with pytest.warns(UserWarning, match="one process plays all devices") as warned:
        model(*next(batches(1)))
    assert [each.filename for each in warned] == [__file__]  # the line of the call, not one of ours
