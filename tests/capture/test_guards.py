"""Guards where the runtime is the subject: processes, pipelines, every mode; and what a check looks at."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_device import close, parallel
from pipeline_networks import Chain, batches, staged
from ranks import run_ranks, run_scenarios
from small_networks import D, draw
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.capture.guards import Guards
from shardwright.capture.observed_state import Observation
from shardwright.runtime.distributed.dtensors import SUBCLASSES_HAVE_VIEWS

TWO = dict(stages=2, micro_batches=4, stage_config=staged(2))


class Net(nn.Module):
    """Two layers, the first of which is cut; a scale, a mean that is kept, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, dtype=D), nn.Linear(8, 8, dtype=D)
        for i, layer in enumerate((self.first, self.second)):
            layer.weight.data, layer.bias.data = draw(8, 8, seed=i) / 3, draw(8, seed=4 + i)
        self.register_buffer("mean", torch.zeros(8, dtype=D))
        self.beta, self.calls = 2.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.first(x)) * self.beta
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return self.second(h - self.mean)


X, T = draw(8, 8), draw(8, 8, seed=1)


def step(model: Callable, net: nn.Module, loss: Callable, rate: float = 0.1) -> Tensor:
    """A step of SGD; the loss."""
    value = loss(model)
    value.backward()
    with torch.no_grad():
        for p in net.parameters():
            p.sub_(p.grad, alpha=rate)
            p.grad = None
    return value.detach()


def train_both(
    net: nn.Module, one: nn.Module, model: sw.AutoParallel, changes: dict[int, Callable[[nn.Module], Any]]
) -> None:
    """Five steps of a model with a loss inside and of one device, with changes of both before some of them."""
    for i in range(5):
        for each in (net, one):
            changes.get(i, lambda net: None)(each)
        x, t = draw(8, 8, seed=10 + i), draw(8, 8, seed=20 + i)
        mine = step(model, net, lambda m: m(x, t))
        close(mine, step(one, one, lambda m: F.mse_loss(m(x), t)), f"loss of step {i}")
        close(dict(net.named_buffers()), dict(one.named_buffers()), f"buffers after step {i}")
        assert net.calls == one.calls == i + 1


# -- modes -------------------------------------------------------------------------------------------------------------

MODES = (
    "stand_alone",
    "data_parallel",
    "semi_auto",
    "sharding_propagation",
    "recursive_programming",
    "dynamic_programming",
)


@pytest.mark.filterwarnings("ignore::shardwright.RecaptureWarning")
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode: str) -> None:
    """An assigned buffer, a counter, and a number that changes and changes back."""
    net = Net()
    one = copy.deepcopy(net)
    if mode in ("semi_auto", "sharding_propagation"):
        sw.shard(net.first, ((2, 1), (2, 1)))
    model = parallel(net, nn.MSELoss(), devices=4, mode=mode)
    train_both(net, one, model, {2: lambda n: setattr(n, "beta", 5.0), 4: lambda n: setattr(n, "beta", 2.0)})
    assert len(model._programs) == 2


# -- pipelines ---------------------------------------------------------------------------------------------------------


class Remembering(Chain):
    """A chain with an assigned buffer in its second stage, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].register_buffer("seen", torch.zeros(16, dtype=D))
        self.calls, self.beta = 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = super().forward(x) * self.beta
        self.layers[3].seen = self.layers[3].seen + out.detach().sum(0)
        return out


@pytest.mark.filterwarnings("ignore::shardwright.RecaptureWarning")
def test_an_assigned_buffer_in_the_second_stage() -> None:
    net = Remembering()
    one = copy.deepcopy(net)
    model = parallel(net, nn.MSELoss(), devices=4).pipeline(**TWO)
    for i, (x, t) in enumerate(batches(4)):
        for each in (net, one):
            each.beta = 1.0 if i < 2 else 0.5
        close(step(model, net, lambda m: m(x, t)), step(one, one, lambda m: F.mse_loss(m(x), t)))
        close(net.layers[3].seen, one.layers[3].seen)
        assert net.calls == one.calls == i + 1
    assert len(model._programs) == 2


def test_side_effects_that_depend_on_the_size_of_micro_batches() -> None:
    class Sized(Chain):
        rows = 0

        def forward(self, x: Tensor) -> Tensor:
            self.rows = x.shape[0]
            return super().forward(x)

    ((x, t),) = batches(1)
    with pytest.raises(sw.CaptureError, match="depends on the size of the batch: .*net.rows"):
        parallel(Sized(), nn.MSELoss(), devices=4).pipeline(**TWO)(x, t)


# -- what a check looks at ---------------------------------------------------------------------------------------------


def test_a_check_compares_objects_alone() -> None:
    """Nothing of the slow way runs while nothing has changed."""
    model = parallel(Net(), devices=4)
    model(X)
    guards = next(iter(model._programs.values())).guards
    guards.change = None  # it cannot be called
    assert guards.hold()
    model.net.beta = 3.0
    with pytest.raises(TypeError):
        guards.hold()


def test_sizes_share_records_until_something_changes() -> None:
    net = Net()
    model = parallel(net, devices=4)
    for rows in (8, 16):
        model(draw(rows, 8))
    first, second = (program.guards for program in model._programs.values())
    assert second._values is first._values and second._members is first._members
    net.beta = 3.0
    expected = copy.deepcopy(net)(X)
    close(model(X), expected)
    third = next(reversed(model._programs.values())).guards
    assert third._values is not first._values
    assert [guards.hold() for guards in (first, second, third)] == [False, False, True]
    net.beta = 2.0
    assert [guards.hold() for guards in (first, second, third)] == [True, True, False]
    net.second = nn.Linear(8, 8, dtype=D)  # another module: other places
    expected = copy.deepcopy(net)(X)
    close(model(X), expected)
    assert next(reversed(model._programs.values())).guards._members is not first._members


def test_every_guard_can_fail() -> None:
    """Each attribute that the forward reads, each part and each hook, one by one."""
    net = Net()
    net.table, net.names, net.limits = torch.ones(8, dtype=D), {"a": [1.0]}, (1, [2])
    net.forward = lambda x: net.second(
        torch.tanh(net.first(x)) * net.beta * net.table * net.names["a"][0] * net.limits[1][0]
    )
    model = parallel(net, devices=2)
    model(X)
    guards: Guards = next(iter(model._programs.values())).guards
    held, other = dict(vars(net)), nn.Linear(8, 8, dtype=D)

    def trips(change: Callable[[], Any], back: Callable[[], Any]) -> None:
        assert guards.hold()
        change()
        assert not guards.hold() and guards.change()
        back()
        assert guards.hold() and guards.change() is None

    for name in ("beta", "table", "names", "limits", "forward"):
        trips(lambda: vars(net).update({name: object()}), lambda: vars(net).update({name: held[name]}))
        trips(lambda: vars(net).pop(name), lambda: vars(net).update({name: held[name]}))
    trips(lambda: net.names["a"].append(2.0), lambda: net.names["a"].pop())
    trips(lambda: net.names.update(b=1), lambda: net.names.pop("b"))
    trips(lambda: net.limits[1].__setitem__(0, 3), lambda: net.limits[1].__setitem__(0, 2))
    for table, name in ((net._modules, "first"), (net.first._parameters, "weight"), (net._buffers, "mean")):
        kept, order = table[name], dict(table)
        replaced = other if table is net._modules else torch.zeros(8)
        trips(lambda: table.update({name: replaced}), lambda: table.update({name: kept}))
        trips(lambda: table.pop(name), lambda: (table.clear(), table.update(order)))
        trips(lambda: table.update(further=None), lambda: table.pop("further"))
    trips(lambda: net.first.eval(), lambda: net.first.train())
    trips(lambda: net.first.weight.requires_grad_(False), lambda: net.first.weight.requires_grad_(True))
    for tensor in (net.first.weight, net.mean, net.table):
        was = tensor.data
        for changed in (was.float(), was.repeat(2, *[1] * (was.dim() - 1))):
            trips(lambda: setattr(tensor, "data", changed), lambda: setattr(tensor, "data", was))
    for hooked in (
        net.first.register_forward_hook,
        net.first.register_forward_pre_hook,
        net.first.register_full_backward_hook,
        nn.modules.module.register_module_forward_hook,
    ):
        handles: list[Any] = []
        trips(lambda: handles.append(hooked(lambda *a: None)), lambda: handles[0].remove())


RETYPED: dict[str, Callable[[nn.Module], Any]] = {
    "net.bfloat16()": lambda net: net.bfloat16(),
    "net.half()": lambda net: net.half(),
    "net.float()": lambda net: net.float(),
    "net.first.to(float32) and back": lambda net: net.first.to(torch.float32).to(D),
    "wider by .data": lambda net: wider(net.second),
    "a buffer by .data": lambda net: setattr(net.mean, "data", net.mean.data.float()),
}


def wider(layer: nn.Linear) -> None:
    layer.weight.data, layer.bias.data = draw(12, 8, seed=7), draw(12, seed=8)


class Retyped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, dtype=D), nn.Linear(8, 8, dtype=D)
        self.register_buffer("mean", draw(8, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x.to(self.first.weight.dtype))) + self.mean.to(self.first.weight.dtype)
        return self.second(h.to(self.second.weight.dtype)), self.mean * 2


@pytest.mark.parametrize("mode", ["semi_auto", "dynamic_programming"])
@pytest.mark.parametrize("name", RETYPED)
def test_parameters_of_another_dtype_or_shape(name: str, mode: str) -> None:
    """``.bfloat16()`` and ``.data`` change parameters, and leave the objects: planned anew, with a line."""
    torch.manual_seed(0)
    net = Retyped()
    options = {"cluster": sw.Cluster.of("h100x8", 4).with_free_links()} if mode == "dynamic_programming" else {}
    model = parallel(net, devices=4, mode=mode, **options)
    model(X)[0].square().mean().backward()
    net.zero_grad()
    one = copy.deepcopy(net)
    RETYPED[name](net), RETYPED[name](one)
    back = name.endswith("back")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, theirs = model(X), one(X)
    assert len(caught) == (not back)
    if not back:
        assert " was float64[" in str(caught[0].message) or "is another one" in str(caught[0].message)
    ours[0].square().mean().backward(), theirs[0].square().mean().backward()
    for a, b in zip([*ours, *(p.grad for p in net.parameters())], [*theirs, *(p.grad for p in one.parameters())]):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a, b, **({"rtol": 2e-2, "atol": 2e-2} if a.itemsize == 2 else {}))


def test_evaluation_and_freezing_need_no_line() -> None:
    net = Net()
    model = parallel(net, devices=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(4):
            model.train(i % 2 == 0)
            net.first.requires_grad_(i < 2)
            model(X)
    assert len(model._programs) == 4


def test_planning_alone_changes_nothing() -> None:
    net = Net()
    model = parallel(net, devices=2)
    model.infer_layout(X)
    sw.plan(net, (X,), devices=2)
    assert net.calls == 0 and not net.mean.any()
    model(X)
    assert net.calls == 1 and net.mean.any()


def test_copies_check_for_themselves() -> None:
    model = parallel(Net(), devices=2)
    model(X)
    counterpart = copy.deepcopy(model)
    counterpart.net.beta = 5.0
    expected = copy.deepcopy(counterpart.net)(X)
    close(counterpart(X), expected)
    assert (model.net.calls, counterpart.net.calls, model.net.beta) == (1, 2, 2.0)


# -- processes ---------------------------------------------------------------------------------------------------------

SCENARIOS: dict[str, Callable[[int, int], None]] = {}


def scenario(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    SCENARIOS[function.__name__] = function
    return function


def wrapped(net: nn.Module, loss_fn: Any = F.mse_loss) -> sw.AutoParallel:
    sw.init()
    sw.shard(net.first, ((1, 1), (2, 1)))
    return sw.AutoParallel(net, loss_fn).dataset_strategy("full_batch")


def raised(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except sw.ShardwrightError as error:
        return error
    return None


def alike_on_all(error: Exception | None) -> None:
    text: list[Any] = [None, None]
    dist.all_gather_object(text, str(error))
    assert error is not None and text[0] == text[1], text


@scenario
def all_ranks_change(rank: int, world: int) -> None:
    net = Net()
    one = copy.deepcopy(net)
    model = wrapped(net)
    for i in range(5):
        for each in (net, one):
            each.beta = 5.0 if i in (2, 3) else 2.0
            if i == 4:
                each.mean = torch.ones(8, dtype=D)
        loss, expected = model(X, T), F.mse_loss(one(X), T)
        close(loss, expected, f"loss {i}")
        close(net.mean, one.mean, f"mean {i}")
        loss.backward(), expected.backward()
        assert net.calls == one.calls == i + 1
    assert len(model._programs) == 3


@scenario
def ranks_change_to_unlike_values(rank: int, world: int) -> None:
    net = Net()
    model = wrapped(net)
    model(X, T).backward()
    net.beta = 5.0 + rank
    error = raised(lambda: model(X, T))
    assert isinstance(error, sw.RuntimeMismatchError), error
    alike_on_all(error)


@scenario
def a_submodule_is_replaced(rank: int, world: int) -> None:
    net = Net()
    model = wrapped(net)
    model(X, T).backward()
    net.second = nn.Linear(8, 8, dtype=D)
    first, rows = net.first.weight, net.first.weight.to_local().clone()
    net.second.weight.data, net.second.bias.data = draw(8, 8, seed=7), draw(8, seed=8)
    one = Net()
    one.second, one.mean = copy.deepcopy(net.second), net.mean.clone()
    model(X, T).backward()
    F.mse_loss(one(X), T).backward()
    assert net.first.weight is first and torch.equal(first.to_local(), rows)
    close(net.second.weight.grad.full_tensor(), one.second.weight.grad)


@scenario
def the_model_is_converted(rank: int, world: int) -> None:
    net = Net()
    model = wrapped(net)
    model(X, T).backward()
    if not SUBCLASSES_HAVE_VIEWS:  # parameters are plain DTensors: the next call finds the conversion
        net.bfloat16()
        for _ in range(2):
            error = raised(lambda: model(X, T))
            assert isinstance(error, sw.SettingError) and "net.first.weight was float64[8, 8] and is bfloat16" in str(
                error
            )
            assert "mixed_precision" in error.legal
            alike_on_all(error)
        return
    for convert in (net.bfloat16, model.half):
        error = raised(convert)
        assert isinstance(error, sw.SettingError) and "float16 is assigned to the parameter 'first.weight'" in str(
            error
        )
        assert "mixed_precision" in error.legal
        alike_on_all(error)
    model(X, T).backward()


class Asking(Net):
    """A forward that depends on the mode of gradients and on the strides of its input."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x * (1 if x.is_contiguous() else 3))
        return out * (2 if torch.is_grad_enabled() else 3)


@scenario
def all_ranks_ask_for_the_mode_of_gradients(rank: int, world: int) -> None:
    net = Asking()
    one = copy.deepcopy(net)
    model = wrapped(net)
    for mode in (torch.no_grad, torch.enable_grad, torch.no_grad):
        with mode():
            close(model(X, T), F.mse_loss(one(X), T))
    assert len(model._programs) == 2


@scenario
def one_rank_hands_over_a_transposed_input(rank: int, world: int) -> None:
    model = wrapped(Asking())
    model(X, T)  # without a backward, as above
    error = raised(lambda: model(X if rank else X.t().contiguous().t(), T))
    assert isinstance(error, sw.ShardwrightError) and "has strides [1, 8]" in str(error), error


@pytest.fixture(scope="module")
def results() -> list[dict[str, str | None]]:
    sw.init(devices=2)
    net = Net()  # what a first capture and a first backward load, before the ranks are forked
    sw.AutoParallel(net, F.mse_loss).dataset_strategy("full_batch")(X, T).backward()
    return run_ranks(run_scenarios, 2, SCENARIOS)


@pytest.mark.filterwarnings("ignore::shardwright.RecaptureWarning")
@pytest.mark.parametrize("name", SCENARIOS)
def test_on_two_ranks(results: list[dict[str, str | None]], name: str) -> None:
    for rank, text in enumerate(results):
        assert text[name] is None, f"rank {rank}: {text[name]}"


def one_rank_changes(rank: int, world: int) -> str:
    net = Net()
    model = wrapped(net)
    model(X, T)  # without a backward, so that the next call of rank 0 is a meeting, which raises, and no collective
    net.beta = 5.0 if rank else 2.0
    error = raised(lambda: model(X, T))
    return f"{type(error).__name__}: {error}"


@pytest.mark.filterwarnings("ignore::shardwright.RecaptureWarning")
def test_one_rank_changes() -> None:
    """An error on both ranks, which says what has changed; nobody hangs."""
    for text in run_ranks(one_rank_changes, 2):
        assert text.startswith("RuntimeMismatchError"), text
        assert "call 2 of rank 1 is the planning of a model: net.beta was 2.0 and is 5.0" in text, text


class Plain:
    """An object of the user."""


def reader(held: list) -> Callable:
    return lambda: held


def test_an_observation_takes_no_object_for_an_earlier_one_of_the_same_id() -> None:
    """The functions and objects die after the observation has met them: the next one may get the id of the last."""
    seen = Observation([], [])
    for number in range(20):
        seen._found(reader([number]), "net.function")
        seen._found(Plain(), "net.plain")
    assert sum(place.key == "held" for place in seen.reads.values()) == 20  # the cell of each function
    assert sum(kept.path == "net.plain" for kept in seen._spaces.values()) == 20
