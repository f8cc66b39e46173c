"""Functions of models as one module, and calls of modules that are led elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.capture.module_calls import FunctionOfModels, as_written, redirected, together

D = torch.float64


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = sw.shard(torch.matmul, in_strategy=((2, 1), (1, 1)))
        self.weight, self.layer = nn.Parameter(torch.randn(6, 4, dtype=D)), nn.Linear(4, 2, dtype=D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.product(x, self.weight))


X = torch.randn(8, 6, dtype=D)


def test_names_are_those_of_the_model_alone() -> None:
    net = Marked()
    function = FunctionOfModels(lambda batch, label: (net(batch) - label).square().mean(), net)
    assert dict(function.named_parameters()).keys() == dict(net.named_parameters()).keys()
    graph = capture(function, (X, torch.zeros(8, 2, dtype=D)))
    assert [op.name for op in graph.ops][:2] == ["product", "linear"] and graph.ops[0].mark is not None
    assert [value.name for value in graph.inputs] == ["batch", "label"]
    assert graph.ops[1].module == "layer"


def test_several_models_stand_under_their_names() -> None:
    nets = {"first": Marked(), "second": nn.Linear(2, 2, dtype=D)}
    function = FunctionOfModels(lambda x: nets["second"](nets["first"](x)), together(nets))
    graph = capture(function, (X,))
    assert set(graph.parameters) == {f"first.{n}" for n in ("weight", "layer.weight", "layer.bias")} | {
        "second.weight",
        "second.bias",
    }
    assert graph.ops[0].name == "first.product"
    assert [op.module for op in graph.ops] == ["first", "first.layer", "second"]


def test_a_copy_of_a_copy_calls_its_own_models() -> None:
    net = Marked()
    function = FunctionOfModels(lambda x: net(x), net)
    copies = [function, copy.deepcopy(function)]
    copies.append(copy.deepcopy(copies[1]))
    for i, each in enumerate(copies[1:], 1):
        with torch.no_grad():
            each.layer.bias.fill_(float(i))
    with torch.no_grad():
        net.layer.bias.zero_()
        plain = net(X)
    for i, each in enumerate(copies):
        torch.testing.assert_close(each(X), plain + i)
    torch.testing.assert_close(net(X), plain)


def test_calls_are_led_elsewhere_and_back() -> None:
    net = nn.Linear(6, 4)
    seen: list[str] = []
    net.register_forward_hook(lambda *_: seen.append("hook"))
    x = torch.ones(1, 6)
    with redirected({net: lambda x: "outer"}):
        assert net(x) == "outer"
        with redirected({net: lambda x: "inner"}):
            assert net(x) == "inner"
            with as_written():
                assert net(x).shape == (1, 4)
                with redirected({net: lambda x: "innermost"}):
                    assert net(x) == "innermost"
                assert net(x).shape == (1, 4)
            assert net(x) == "inner"
        assert net(x) == "outer"
    assert net(x).shape == (1, 4) and seen == ["hook"] * 3
    with pytest.raises(ZeroDivisionError), redirected({net: lambda x: 1 / 0}):
        net(x)
    assert net(x).shape == (1, 4)


@pytest.mark.filterwarnings("ignore")
def test_a_step_is_verified_like_a_model(tmp_path) -> None:
    """``shardwright verify`` copies the model of a step's function, and finds what its copy computes."""
    from shardwright.cli.verify_command import verify_script

    script = tmp_path / "step.py"
    script.write_text(
        "import torch, torch.nn as nn, shardwright as sw\n"
        "sw.init(devices=4)\n"
        "net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))\n"
        "grad_fn = sw.value_and_grad(lambda x, y: nn.functional.mse_loss(net(x), y), None, net)\n"
        "sw.AutoParallel(lambda x, y: grad_fn(x, y))(torch.randn(8, 6), torch.randn(8, 2))\n"
    )
    report = verify_script(str(script), [], None, 2, cut=True)
    assert report.ok and report.plan.devices == 4
    assert report.max_loss_difference < 1e-12
