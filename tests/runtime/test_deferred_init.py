"""`no_init_parameters`: nothing is allocated, and what comes into being later is what one device would have made."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from one_device import parallel
from small_networks import draw, labels
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from shardwright.runtime import deferred_init
from shardwright.runtime.deferred_init import put_in_place


def built(make: Callable[[], nn.Module], seed: int = 3) -> tuple[nn.Module, nn.Module]:
    """The same model made both ways under one seed: (deferred, ordinary)."""
    torch.manual_seed(seed)
    with sw.no_init_parameters():
        net = make()
    torch.manual_seed(seed)
    return net, make()


def assert_bit_equal(net: nn.Module, one: nn.Module) -> None:
    ours, theirs = net.state_dict(), one.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


class Everything(nn.Module):
    """Initialisations of all kinds, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(8, 8) * 0.01)
        self.listed = nn.ParameterList(torch.rand(8, 8) for _ in range(2))
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.full((8,), 3.0))})
        self.sparse = nn.Parameter(torch.zeros(8, 8))
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False))
        nn.init.trunc_normal_(self.layers[0].weight, std=0.2)
        nn.init.orthogonal_(self.layers[2].weight)
        nn.init.kaiming_uniform_(self.listed[0], a=math.sqrt(5))
        torch.manual_seed(11)  # seeding inside
        nn.init.xavier_normal_(self.listed[1])
        nn.init.sparse_(self.sparse, 0.3)
        torch.randn(3, device="cpu")  # values that are needed at once
        self.layers[0].bias.data.normal_()
        with torch.no_grad():
            self.plain[0].fill_(3.0)
            self.plain[:, 1:].mul_(2)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.layers[2].weight
        self.register_buffer("noise", torch.rand(8))
        self.register_buffer("order", torch.arange(8), persistent=False)
        self.real = nn.Parameter(torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]))
        self.late = nn.Parameter(torch.empty(8).uniform_(-1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.plain + torch.tanh(x @ self.listed[0] @ self.listed[1]) * self.named["a"]
        return self.tied(x @ self.layers[2].weight) * self.real + self.noise * self.late + self.order + x @ self.sparse


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.constant_(module.bias, 0.5)


MODELS = {
    "linear": lambda: nn.Linear(8, 8),
    "mlp": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)),
    "everything": Everything,
    "applied": lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))).apply(
        initialise
    ),
    "in float64": lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double(),
    "in bfloat16": lambda: nn.Linear(8, 8, dtype=torch.bfloat16),
    "copies": lambda: nn.Sequential(*[copy.deepcopy(layer) for layer in [nn.Linear(8, 8)] * 3]),
    "frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_an_ordinary_construction(name) -> None:
    net, one = built(MODELS[name])
    objects = {n: p for n, p in net.named_parameters()}
    state = torch.get_rng_state()
    x = torch.randn(16, 8).to(next(one.parameters()).dtype)
    torch.set_rng_state(state)
    got = parallel(net, on_missing_rule="replicate")(x)
    assert torch.equal(torch.get_rng_state(), state)  # what the user draws next is not disturbed
    assert_bit_equal(net, one)
    assert all(objects[n] is p for n, p in net.named_parameters())
    assert [p.requires_grad for p in net.parameters()] == [p.requires_grad for p in one.parameters()]
    torch.testing.assert_close(got, one(x))


@pytest.mark.parametrize(
    "layers",
    [
        lambda: nn.Conv2d(3, 8, 3),
        lambda: nn.ConvTranspose1d(4, 8, 2),
        lambda: nn.BatchNorm2d(8),
        lambda: nn.GroupNorm(2, 8),
        lambda: nn.Embedding(10, 8, padding_idx=2),
        lambda: nn.MultiheadAttention(8, 2),
        lambda: nn.Bilinear(8, 8, 8),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False),
    ],
    ids=range(8),
)
def test_layers_that_ship_with_torch(layers) -> None:
    from shardwright.runtime.deferred_init import materialize

    net, one = built(lambda: nn.Sequential(layers(), nn.Linear(8, 8)))
    assert all(p.is_meta for p in net.parameters())
    materialize(net, lambda name, old, whole: whole, real=False)
    assert_bit_equal(net, one)


def test_nothing_is_allocated() -> None:
    with sw.no_init_parameters():
        net = nn.Sequential(*[nn.Linear(1 << 20, 1 << 20) for _ in range(4)], nn.BatchNorm1d(1 << 20))  # 16 TiB
        optimizer = torch.optim.AdamW(net.parameters())
    assert all(p.is_meta for p in net.parameters()) and net[4].running_mean.is_meta
    assert len(optimizer.param_groups[0]["params"]) == 10
    plan = sw.plan(nn.Sequential(net[0], net[3]), (torch.empty(8, 1 << 20, device="meta"),), devices=1024)
    assert plan.parameters["0.weight"].shape == (1 << 20, 1 << 20)


def test_outside_of_the_block_everything_is_as_ever() -> None:
    with pytest.raises(ZeroDivisionError), sw.no_init_parameters():
        raise ZeroDivisionError
    assert torch.randn(2).device.type == "cpu" and not nn.Linear(2, 2).weight.is_meta


def test_an_optimizer_that_was_built_before() -> None:
    for inside in (True, False):
        torch.manual_seed(1)
        with sw.no_init_parameters():
            net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            if inside:
                optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        if not inside:
            optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        torch.manual_seed(1)
        one = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        other = torch.optim.AdamW(one.parameters(), 0.01)
        other_schedule = torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
        model, loss = parallel(net, nn.CrossEntropyLoss()), nn.CrossEntropyLoss()
        for step in range(3):
            x, t = draw(16, 8, seed=step).float(), labels(16, seed=step)
            model(x, t).backward(), loss(one(x), t).backward()
            for o, s in ((optimizer, schedule), (other, other_schedule)):
                o.step(), s.step(), o.zero_grad()
        torch.testing.assert_close(net.state_dict(), one.state_dict())


def test_marks_inside_of_the_block() -> None:
    def make() -> nn.Module:
        return nn.Sequential(sw.shard(nn.Linear(8, 8), ((2, 2), (2, 2), (2,))), sw.shard(nn.ReLU(), ((8, 1),)))

    net, one = built(make)
    x = draw(16, 8).float()
    torch.testing.assert_close(parallel(net)(x), one(x))
    assert_bit_equal(net, one)


def test_a_loss_with_parameters_and_a_second_batch_size() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(()) + 1)

        def forward(self, scores, target):
            return nn.functional.cross_entropy(scores / self.scale, target)

    (net, one), (loss, one_loss) = built(lambda: nn.Linear(8, 8)), built(Scaled)
    model = parallel(net, loss)
    for size in (16, 32):
        if size == 32:
            nn.init.ones_(net.weight), nn.init.ones_(one.weight)  # it has values by now
        x, t = draw(size, 8).float(), labels(size)
        with pytest.warns(sw.RecaptureWarning) if size == 32 else open("/dev/null"):
            torch.testing.assert_close(model(x, t), one_loss(one(x), t))


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_values_written_too_early_are_an_error() -> None:
    x = draw(16, 8).float()
    for write in (
        lambda n: n.apply(initialise),
        lambda n: n.load_state_dict(nn.Linear(8, 8).state_dict()),
        lambda n: nn.init.ones_(n.weight),
    ):
        with sw.no_init_parameters():
            net = nn.Linear(8, 8)
        write(net)
        with pytest.raises(sw.SettingError, match="weight.* was written to") as raised:
            parallel(net)(x)
        assert "inside of the block" in raised.value.legal


def test_what_cannot_come_into_being_later_is_an_error() -> None:
    with sw.no_init_parameters():
        net = nn.LSTM(8, 8)  # holds weak references to its parameters
    with pytest.raises(sw.SettingError, match="weight_ih_l0.*weakref"):
        parallel(net, on_missing_rule="replicate")(draw(4, 2, 8).float())


def test_meta_tensors_of_somebody_else_are_an_error() -> None:
    for make in (
        lambda: nn.Linear(8, 8, device="meta"),
        lambda: copy.deepcopy(built(lambda: nn.Linear(8, 8))[0]),
        lambda: built(lambda: nn.Linear(8, 8))[0].double(),
    ):
        with pytest.raises(sw.SettingError, match="weight.*bias") as raised:
            parallel(make())(draw(16, 8).to(torch.float64))
        assert "no_init_parameters" in raised.value.legal


@pytest.mark.parametrize("inside", [True, False])
def test_an_optimizer_that_notes_something_of_each_parameter_when_it_is_built(inside: bool) -> None:
    def adagrad(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(module.parameters(), 0.1, initial_accumulator_value=0.2)

    torch.manual_seed(3)
    with sw.no_init_parameters():
        net = MODELS["mlp"]()
        ours = adagrad(net) if inside else None
    torch.manual_seed(3)
    one = MODELS["mlp"]()
    ours, theirs = ours or adagrad(net), adagrad(one)
    model = parallel(net, nn.CrossEntropyLoss(), devices=2)
    for seed in range(2):
        x, t = draw(8, 8, seed=seed).float(), labels(8, seed=seed)
        model(x, t).backward(), nn.CrossEntropyLoss()(one(x), t).backward()
        ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
    for p, q in zip(net.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_tensor_with_values_and_a_weak_reference_takes_others() -> None:
    old, new = torch.zeros(3), torch.ones(3)
    watched = weakref.ref(old)
    put_in_place(old, new)
    assert watched() is old and torch.equal(old, torch.ones(3))


# -- values that come from elsewhere


class Tables(nn.Module):
    """Random weights, a random buffer among them, and tables that no checkpoint has."""

    def __init__(self, noisy: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        nn.init.trunc_normal_(self.first.weight)
        self.register_buffer("table", torch.arange(8).float() * self.first.in_features, persistent=False)
        self.register_buffer("noise", torch.rand(8) if noisy else torch.ones(8), persistent=False)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) + self.table + self.noise)


@pytest.mark.parametrize("noisy", [False, True])
def test_what_a_checkpoint_fills_is_not_drawn(noisy: bool, tmp_path, monkeypatch) -> None:
    x = torch.randn(4, 8)
    saved, _ = built(lambda: Tables(noisy))
    first = parallel(saved, devices=2)
    expected = first(x)
    sw.save_checkpoint(first, path=tmp_path, step=1)
    net, _ = built(lambda: Tables(noisy))
    model = parallel(net, devices=2)
    sw.load_checkpoint(model, path=tmp_path)
    plain, random = deferred_init._replay, []

    def replay(tape, waiting, *given):
        calls = [tape.calls[i][0] for i in deferred_init._needed(tape, waiting)]
        random.extend(c for c in calls if torch.Tag.nondeterministic_seeded in getattr(c, "tags", ()))
        assert noisy or 0 < len(calls) < 6 < len(tape.calls)
        plain(tape, waiting, *given)

    monkeypatch.setattr(deferred_init, "_replay", replay)
    state = torch.get_rng_state()
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert bool(random) is noisy
    assert_bit_equal(net, saved)
    assert torch.equal(net.table, saved.table) and torch.equal(net.noise, saved.noise)


def test_a_load_that_fails_leaves_no_program_without_values(tmp_path) -> None:
    saved, _ = built(lambda: Tables(False))
    first = parallel(saved, devices=2)
    x = torch.randn(4, 8)
    expected = first(x)
    sw.save_checkpoint(first, path=tmp_path, step=1)
    net, _ = built(lambda: Tables(False))
    model = parallel(net, devices=2)
    sw.load_checkpoint(model, path=tmp_path)
    (take,) = model._awaited

    def broken() -> None:
        raise OSError("the disk is gone")

    model._awaited[:] = [broken]
    with pytest.raises(OSError, match="gone"):
        model(x)
    model._awaited[:] = [take]
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_fingerprints_are_copied_from_a_device_at_once() -> None:
    class Copies(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)]).requires_grad_(False)
    with Copies() as copies:
        found = deferred_init.beginnings(net)
    assert copies.count == 0
    assert found == {n: p.double().sum().item() for n, p in net.named_parameters()}
    assert list(found) == [n for n, _ in net.named_parameters()]
