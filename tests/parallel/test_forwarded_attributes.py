"""Attributes of the wrapper, read, assigned and deleted: those of the model, but for the wrapper's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_device import close, parallel
from small_networks import D, draw
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw

pytestmark = pytest.mark.filterwarnings("ignore::shardwright.RecaptureWarning")

X = draw(8, 8)


class Net(nn.Module):
    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.beta, self._power = nn.Linear(8, 8, dtype=D), 1.0, 1.0
        self.register_buffer("shift", torch.ones((), dtype=D))
        self.table = torch.ones(8, dtype=D)

    @property
    def gain(self) -> float:
        return self._power

    @gain.setter
    def gain(self, value: float) -> None:
        self._power = value

    def forward(self, x: Tensor) -> Tensor:
        further = getattr(self, "further", 1.0) * getattr(self, "_further", 1.0)
        h = self.layer(x) * self.beta * self.factor * self._power * further + self.shift
        return h * self.table if self.training else h


def _layer() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(8, 8, dtype=D)


def deleted_and_new(m: Any) -> None:
    del m.shift
    m.register_buffer("shift", torch.tensor(3.0, dtype=D))


def added_and_deleted(m: Any) -> None:
    m.beta += 1
    m.further = 7.0
    del m.further


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda m: setattr(m, "beta", 5.0),
    "a number that is read first": lambda m: setattr(m, "beta", m.beta * 5),
    "an attribute of the class": lambda m: setattr(m, "factor", 3.0),
    "a property": lambda m: setattr(m, "gain", 4.0),
    "a private name": lambda m: setattr(m, "_power", 4.0),
    "a new name": lambda m: setattr(m, "further", 5.0),
    "a new private name": lambda m: setattr(m, "_further", 5.0),
    "a tensor": lambda m: setattr(m, "table", torch.full((8,), 3.0, dtype=D)),
    "a buffer": lambda m: setattr(m, "shift", torch.tensor(5.0, dtype=D)),
    "a submodule": lambda m: setattr(m, "layer", _layer()),
    "a number becomes a parameter": lambda m: (delattr(m, "beta"), m.register_parameter("beta", _layer().bias)),
    "the mode": lambda m: setattr(m, "training", False),
    "deleted, and a new one": deleted_and_new,
    "added and deleted": added_and_deleted,
}


@pytest.mark.parametrize("before", [True, False], ids=["before the first call", "after it"])
@pytest.mark.parametrize("name", CHANGES)
def test_assigned_as_on_one_device(name: str, before: bool) -> None:
    net = Net()
    one = copy.deepcopy(net)
    model = parallel(net, devices=4)
    if not before:
        model(X)
    for each in (model, one):
        CHANGES[name](each)
    close(model(X), one(X), name)
    close(dict(net.named_parameters()), dict(one.named_parameters()))
    assert {k for k in vars(net) if not k.startswith("_")} == {k for k in vars(one) if not k.startswith("_")}
    assert model.beta is net.beta or isinstance(net.beta, float)
    assert (model.training, model.factor, model.gain) == (one.training, one.factor, one.gain)


def test_a_deleted_attribute_is_gone() -> None:
    model = parallel(Net(), devices=2)
    del model.beta, model.layer
    assert not hasattr(model.net, "beta") and not hasattr(model, "layer")
    with pytest.raises(AttributeError):
        del model.beta
    with pytest.raises(AttributeError):
        model.beta


def test_the_loss_is_assigned() -> None:
    """The wrapper's own: the model has no submodule of that name afterwards."""
    net = Net()
    model = parallel(net, nn.MSELoss(), devices=4)
    close(model(X, X), F.mse_loss(net(X), X))
    model.loss_fn = F.l1_loss
    close(model(X, X), F.l1_loss(net(X), X))
    model.loss_fn = nn.HuberLoss(delta=0.1)
    close(model(X, X), F.huber_loss(net(X), X, delta=0.1))
    model.loss_fn = None
    close(model(X), net(X))
    assert list(net._modules) == ["layer"]
    with pytest.raises(sw.SettingError, match="cannot be called"):
        model.loss_fn = 3


def test_what_belongs_to_the_wrapper_stays_there() -> None:
    net = Net()
    model = parallel(net, devices=2)
    forward = model.forward
    model._original_forward, model.forward = forward, lambda x: forward(x) * 2  # as accelerate does
    close(model(X), net(X) * 2)
    assert "forward" not in vars(net) and vars(model).pop("_original_forward") is not None
    del model.forward
    close(model(X), net(X))
    for own in ("_settings", "_programs", "_stored", "_place", "_kind", "loss_fn"):
        assert own in vars(model) and own not in vars(net)


class Named(Net):
    def __init__(self) -> None:
        super().__init__()
        self.pipeline = 3


def test_names_that_cannot_be_assigned() -> None:
    model = parallel(Named(), devices=2)
    with pytest.raises(sw.SettingError, match="both AutoParallel and the Named") as caught:
        model.pipeline = 4
    assert caught.value.legal == "model.net.pipeline = …"
    with pytest.raises(sw.SettingError, match=r"model\.net is assigned: a Net in the place of the Named") as caught:
        model.net = Net()
    assert "a new AutoParallel" in caught.value.legal


def test_one_line_says_what_has_changed() -> None:
    model = parallel(Net(), devices=2)
    model(X)
    model.beta = 5.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(X)
    assert [str(w.message).split(":")[0] for w in caught] == ["net.beta was 1.0 and is 5.0"]


def test_a_copy_has_attributes_of_its_own() -> None:
    model = parallel(Net(), devices=2)
    counterpart = copy.deepcopy(model)
    counterpart.beta = 5.0
    assert (model.net.beta, counterpart.net.beta) == (1.0, 5.0)
    close(counterpart(X), counterpart.net(X))
