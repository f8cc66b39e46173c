"""Questions that a forward asks of a call: the mode of gradients, values of plain tensors, strides and shared memory of
inputs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from habit_models import D, batches, run_both
from one_device import close, parallel
from torch import Tensor, is_grad_enabled as renamed, nn
from torch.nn import functional as F

import shardwright as sw

pytestmark = pytest.mark.filterwarnings("ignore::shardwright.RecaptureWarning")

X = batches()[1]


class Net(nn.Module):
    """Two layers around ``f(self, h)``, with plain tensors."""

    def __init__(self, f: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(8, 8, dtype=D), nn.Linear(8, 4, dtype=D)
        self.register_buffer("ema", torch.zeros(8, dtype=D))
        self.one, self.half, self.sizes = torch.tensor(1), torch.tensor(0.5), torch.tensor([1, 2])
        self.first_sizes = torch.tensor([1, 2])
        self.table, self.held = torch.ones(100, dtype=D), {"scale": [torch.tensor(0.5)]}
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, self.layer(x))


def both(net: Net, devices: int = 4) -> tuple[sw.AutoParallel, Net]:
    return parallel(net, devices=devices), copy.deepcopy(net)


# -- the mode of gradients ---------------------------------------------------------------------------------------------

MODES = {"gradients": torch.enable_grad, "none": torch.no_grad, "inference": torch.inference_mode}


def average(m: Net, h: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        m.ema = 0.9 * m.ema + 0.1 * h.detach().mean(0)
    return m.head(h)


ASKING: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "is_grad_enabled": average,
    "by a name of its own": lambda m, h: m.head(h * (2 if renamed() else 3)),
    "is_inference_mode_enabled": lambda m, h: m.head(h * (2 if torch.is_inference_mode_enabled() else 3)),
    "requires_grad": lambda m, h: m.head(h * (2 if h.requires_grad else 3)),
    "grad_fn": lambda m, h: m.head(h * (2 if h.grad_fn is None else 3)),
    "is_leaf": lambda m, h: m.head(h * (2 if h.is_leaf else 3)),
    "is_inference": lambda m, h: m.head(h * (2 if h.is_inference() else 3)),
}


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("name", ASKING)
def test_a_program_for_each_mode_that_is_asked_for(name: str, first: str) -> None:
    model, one = both(Net(ASKING[name]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as between training and evaluation, no line is needed
        for mode in [first, *MODES, *MODES]:
            with MODES[mode]():
                ours, theirs = model(X), one(X)
            close(ours, theirs, f"{name} in {mode}")
            close(model.net.ema, one.ema)
    assert len(model._programs) == 2


@pytest.mark.parametrize("name", ["requires_grad", "grad_fn", "is_leaf"])
def test_answers_at_a_further_size(name: str) -> None:
    model, one = both(Net(ASKING[name]))
    for rows in (8, 4, 12):
        x = torch.cat([X, X])[:rows]
        close(model(x), one(x), name)


@pytest.mark.parametrize("f", [lambda m, h: m.head(h), lambda m, h: m.head(h * m.layer.weight.requires_grad)])
def test_one_program_where_nothing_asks(f: Callable) -> None:
    model, _ = both(Net(f))
    for mode in (*MODES, *MODES):
        with MODES[mode]():
            model(X)
    (guards,) = [program.guards for program in model._programs.values()]
    assert not guards._conditions


def test_functions_of_torch_are_put_back() -> None:
    names = ("is_grad_enabled", "equal", "allclose")
    functions, methods = [getattr(torch, name) for name in names], dict(vars(Tensor))
    with pytest.raises(sw.CaptureError):
        both(Net(lambda m, h: m.head(h) * h.sum().item()))[0](X)
    assert [getattr(torch, name) for name in names] == functions and renamed is torch.is_grad_enabled
    assert dict(vars(Tensor)) == methods


# -- values of plain tensors -------------------------------------------------------------------------------------------

TAKING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "float": lambda m, h: h * float(m.half),
    "item": lambda m, h: h * m.half.item(),
    "int": lambda m, h: h * int(m.one),
    "range": lambda m, h: h * sum(range(int(m.one) + 2)),
    "tolist": lambda m, h: h.split([*m.sizes.tolist(), 5], 1)[1].sum(1, keepdim=True) * h,
    "a number of two tensors": lambda m, h: h * float(m.half * m.one),
    "an index": lambda m, h: h[:, : m.one].sum(1, keepdim=True) * h,
    "a size": lambda m, h: h * torch.ones(m.one, dtype=D).sum(),
    "a fill value": lambda m, h: h * torch.full((8,), m.half, dtype=D),
    "a dim": lambda m, h: h * h.sum(m.one, keepdim=True).mean(),
    **({"a shift": lambda m, h: h.roll(m.one, 1)} if torch.__version__ >= "2.10" else {}),  # 2.9 takes numbers alone
    "a setting": lambda m, h: F.leaky_relu(h, m.half),
    "in a container": lambda m, h: h * float(m.held["scale"][0]),
    "torch.equal": lambda m, h: h * (2 if torch.equal(m.sizes, m.first_sizes) else 3),
    "a large one": lambda m, h: h * m.table.tolist()[0],
}


def change(net: Any, step: int) -> None:
    """Other values at step 2, others at step 4."""
    later = step > 1
    net.one.fill_(0 if later else 1), net.half.fill_(0.25 if later else 0.5)
    net.held["scale"][0].data.fill_(0.25 if later else 0.5)  # which torch does not count
    net.sizes.copy_(torch.tensor([2, 1] if later else [1, 2]))
    if later:
        net.table.mul_(3)


@pytest.mark.parametrize("name", TAKING)
def test_values_that_python_takes(name: str) -> None:
    net = Net(lambda m, h: m.head(TAKING[name](m, h)))
    model, one = both(net)
    programs = []
    for step in (0, 1, 2, 3, 0):
        if step or programs:
            change(net, step), change(one, step)
        close(model(X), one(X), f"{name}, step {step}")
        programs.append(len(model._programs))
    large = name in ("a large one",)
    assert programs == ([1, 1, 2, 3, 3] if large else [1, 1, 2, 2, 2]), programs


def test_values_that_operators_read_need_no_program() -> None:
    def f(m: Net, h: Tensor) -> Tensor:
        return m.head(h * m.half * m.table[:8] * m.held["scale"][0])

    net = Net(f)
    model, one = both(net)
    for step in range(4):
        change(net, step), change(one, step)
        close(model(X), one(X))
    assert len(model._programs) == 1


def test_parameters_and_buffers_in_lists_are_no_plain_tensors() -> None:
    net = Net(lambda m, h: m.head(h + len(m.all) + m.ema))
    net.all = [net.layer.weight, net.ema, net.head.bias]
    model, _ = both(net)
    for _ in range(3):
        model(X).sum().backward()
        with torch.no_grad():
            net.layer.weight.sub_(0.1)
    assert len(model._programs) == 1


def test_one_line_says_which_value_has_changed() -> None:
    net = Net(lambda m, h: m.head(h * float(m.half)))
    model, _ = both(net)
    model(X)
    net.half.fill_(2.0)
    with pytest.warns(sw.RecaptureWarning, match=r"net\.half was 0\.5 and is 2\.0: the model is captured"):
        model(X)


def annealed(m: Any, x: Tensor) -> Tensor:
    return m.out(m.inner(x) * float(m.beta_tensor))


@pytest.mark.parametrize("devices", [1, 4])
def test_a_value_that_changes_while_training(devices: int) -> None:
    def prepare(net: Any) -> None:
        net.beta_tensor = torch.tensor(1.0)

    model = run_both(annealed, devices, lambda net, step: net.beta_tensor.fill_(step // 2 + 1.0), prepare=prepare)
    assert len(model._programs) == 3


SHIFT = torch.ones(8, dtype=D)

CHANGING: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "an attribute": (lambda m, h: h * m.half.add_(1), "net.half"),
    "in a list": (lambda m, h: h * m.held["scale"][0].add_(1), "net.held['scale'][0]"),
    "a global": (lambda m, h: h + SHIFT.mul_(2), "test_conditions.SHIFT"),
}


@pytest.mark.parametrize("name", CHANGING)
def test_plain_tensors_that_a_forward_changes(name: str) -> None:
    f, path = CHANGING[name]
    with pytest.raises(sw.CaptureError, match=r"a plain tensor of shape") as raised:
        both(Net(lambda m, h: m.head(f(m, h))))[0](X)
    assert path in str(raised.value) and "lifted" not in str(raised.value)
    assert "test_conditions.py" in raised.value.source


# -- inputs ------------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Any]] = {
    "is_contiguous": lambda x: x.is_contiguous(),
    "stride": lambda x: x.stride() == (8, 1),
    "stride of a view": lambda x: x[:4].stride(0) == 8,
    "storage_offset": lambda x: x.storage_offset() == 0,
}


class Strided(nn.Module):
    def __init__(self, condition: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.condition = nn.Linear(8, 8, dtype=D), condition

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x if self.condition(x) else x * 3)


@pytest.mark.parametrize("contiguous_first", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_of_an_input_that_decide(name: str, contiguous_first: bool) -> None:
    model = parallel(Strided(LAYOUTS[name]), devices=4)
    if contiguous_first:
        close(model(X), model.net(X))
    with pytest.raises(sw.SettingError, match=r"input 0 of shape \[8, 8\] has strides \[1, 8\]") as caught:
        model(X.t())
    assert "test_conditions.py" in str(caught.value) and "contiguous()" in caught.value.legal
    close(model(X.t().contiguous()), model.net(X.t().contiguous()))


def test_strides_of_inputs_that_nobody_asks_for() -> None:
    model = parallel(Strided(lambda x: x.shape[0] > 4), devices=4)
    for x in (X, X.t(), X[:, :8], X.repeat(1, 2)[:, ::2]):
        close(model(x), model.net(x))


def test_strides_of_a_result() -> None:
    """Those of floating-point inputs decide, those of indices do not."""

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8, dtype=D)

        def forward(self, ids: Tensor, x: Tensor) -> Tensor:
            h = self.table(ids)
            return (h if h.stride(2) == 1 else h * 2) + (x * 2 if x.relu().is_contiguous() else x)

    model = parallel(Embedded(), devices=2)
    ids, x = torch.arange(10).view(2, 5), X.view(2, 4, 8)
    close(model(ids[:, :-1], x), model.net(ids[:, :-1], x))
    with pytest.raises(sw.SettingError, match="input 1 of shape"):
        model(ids[:, :-1], x.transpose(0, 1).contiguous().transpose(0, 1))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=D)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return self.layer(x) + y


ALIASED: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], bool]] = {
    "the same": (lambda x: (x, x), True),
    "a column": (lambda x: (x, x[:, :1]), True),
    "a view of more": (lambda x: (x[:4], x[:4].t().t()), True),
    "a detached one": (lambda x: (x, x.detach()), True),
    "another type": (lambda x: (x, x.view(torch.int64)), True),
    "other rows": (lambda x: (x[:4], x[4:]), False),
    "rows in turns": (lambda x: (x[::2], x[1::2]), False),
    "another tensor": (lambda x: (x, x.clone()), False),
}


@pytest.mark.parametrize("name", ALIASED)
def test_inputs_that_share_memory_and_are_changed(name: str) -> None:
    pair, refused = ALIASED[name]
    model = parallel(InPlace(), devices=4)
    given, expected = X.clone(), X.clone()
    if refused:
        for _ in range(2):
            with pytest.raises(sw.SettingError, match="changes input 0 in place, and input 1 shares memory") as caught:
                model(*pair(given))
            assert "clone()" in caught.value.legal
            close(given, X)  # nothing has run
        model(X.clone(), X[:, :1])
    else:
        close(model(*pair(given)), model.net(*pair(expected)))
        close(given, expected)


def test_inputs_that_share_memory_and_are_only_read() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, dtype=D)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(x) + y

    model = parallel(Adds(), devices=4)
    close(model(X, X[:, :1]), model.net(X, X[:, :1]))
