"""The models that a step function calls: found through what it refers to, named, or an error that says why not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import shardwright as sw

D = torch.float64
X = torch.randn(8, 6, dtype=D)


def layer(inputs: int = 6, outputs: int = 4) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=D)


of_the_file = layer()
parallel_already = sw.AutoParallel(layer())


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = layer(), layer(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(self.generator(x))

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(self.generator(x))

    def as_a_whole(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class Trainer:
    """An object that holds models in an attribute, a list and a dict."""

    def __init__(self) -> None:
        self.net, self.further, self.last = layer(), [layer(4, 4), layer(4, 4)], {"head": layer(4, 3)}
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        return self.net(x)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for net in self.further:
            x = net(x)
        return self.last["head"](x)


def step_of_the_file(x: torch.Tensor) -> torch.Tensor:
    return of_the_file(x)


class Holder:
    """An object that has a model, and is an attribute of its class."""

    only: Holder

    def __init__(self) -> None:
        self.net = layer()


Holder.only = Holder()


def helper(trainer: Any, x: torch.Tensor) -> torch.Tensor:
    return trainer.net(x)


def by_default(x: torch.Tensor, model: nn.Module = of_the_file) -> torch.Tensor:
    return model(x)


gan, trainer = Gan(), Trainer()


def calls_parts(x: torch.Tensor) -> torch.Tensor:
    gan.zero_grad()
    return gan.critic(gan.generator(x))


STEPS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "a global": (step_of_the_file, ["of_the_file"]),
    "a lambda": (lambda x: of_the_file(x), ["of_the_file"]),
    "a default": (by_default, ["model"]),
    "a partial": (functools.partial(lambda model, x: model(x), of_the_file), ["linear"]),
    "behind no_grad": (torch.no_grad()(step_of_the_file), ["of_the_file"]),
    "a method": (trainer.step, ["net", "further_0", "further_1", "head"]),
    "an object that is called": (trainer, ["net"]),
    "an object that is handed on": (lambda x: helper(Holder.only, x), ["net"]),
    "an attribute of an object": (lambda x: trainer.net(x), ["net"]),
    "parts of a module": (calls_parts, ["critic", "generator"]),
    "a module's method of its parts": (gan.parts, ["critic", "generator"]),
    "a module's method of itself": (gan.as_a_whole, ["gan"]),
    "a parallel model's attribute": (lambda x: (parallel_already.no_sync, of_the_file(x))[1], ["of_the_file"]),
}


@pytest.mark.parametrize("name", STEPS)
def test_models_are_found(name: str) -> None:
    sw.init(devices=2)
    function, names = STEPS[name]
    step = sw.AutoParallel(function)
    assert list(step.models) == names
    with torch.no_grad():
        assert torch.allclose(step(X), function(X), rtol=0, atol=1e-12)
    assert all(part.plan.devices == 2 for part in step.models.values())


def test_models_of_an_enclosing_function_and_models_that_are_named() -> None:
    sw.init(devices=2)
    inner, others = layer(), {"first": layer(), "second": layer(4, 4)}

    def step(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    def given(models: dict[str, nn.Module], x: torch.Tensor) -> torch.Tensor:
        return models["second"](models["first"](x))

    assert list(sw.AutoParallel(step).models) == ["inner"]
    for named in (others, list(others.values())):
        parallel = sw.AutoParallel(given, net=named)
        assert torch.allclose(parallel(others, X), given(others, X), rtol=0, atol=1e-12)
        assert list(parallel.models) == (["first", "second"] if named is others else ["net0", "net1"])
    alone = sw.AutoParallel(lambda model, x: model(x), net=inner)
    assert torch.allclose(alone(inner, X), inner(X), rtol=0, atol=1e-12) and alone.net is inner
    assert sw.AutoParallel(net=inner).net is inner  # the keyword of a model, as ever


@torch.compile
def compiled(x: torch.Tensor) -> torch.Tensor:
    return of_the_file(x)


def generator_function(x: torch.Tensor) -> Any:
    yield of_the_file(x)


async def coroutine(x: torch.Tensor) -> torch.Tensor:
    return of_the_file(x)


with_loss = sw.value_and_grad(lambda x: of_the_file(x).sum(), None, of_the_file)

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (
        lambda: sw.AutoParallel(lambda x: 2 * x),
        r"<lambda> \(test_train_step_models\.py:\d+\) is not an nn\.Module, and",
    ),
    "a function of torch": (
        lambda: sw.AutoParallel(torch.relu),
        r"relu is not an nn\.Module(.|\n)*refers to no module(.|\n)*net=model",
    ),
    "neither": (lambda: sw.AutoParallel(3), "3 is not an nn.Module, nor a step function"),
    "nothing": (lambda: sw.AutoParallel(), "None is not an nn.Module"),
    "a class": (lambda: sw.AutoParallel(Gan), "is not an nn.Module, nor a step function"),
    "a model's forward": (lambda: sw.AutoParallel(gan.forward), r"Gan\.forward .* is a method of a Gan, which is a"),
    "a generator": (lambda: sw.AutoParallel(generator_function), "generator_function .* is a generator"),
    "a coroutine": (lambda: sw.AutoParallel(coroutine), "coroutine .* is a coroutine"),
    "compiled": (lambda: sw.AutoParallel(compiled), r"compiled .* torch\.compile(.|\n)*compile=True"),
    "a parallel model": (lambda: sw.AutoParallel(lambda x: parallel_already(x)), "calls 'parallel_already', which is"),
    "a loss of two models": (
        lambda: sw.AutoParallel(calls_parts, nn.MSELoss()),
        "loss_fn beside a step with 2 models, critic and generator: whose loss",
    ),
    "two losses": (lambda: sw.AutoParallel(lambda x: with_loss(x), nn.MSELoss()), "loss_fn beside <lambda> .* itself"),
    "models of no kind": (lambda: sw.AutoParallel(step_of_the_file, net=3), "net=3: not the models of a step"),
    "a model twice": (lambda: sw.AutoParallel(of_the_file, net=of_the_file), "which of them"),
    "a model that is not called": (
        lambda: sw.AutoParallel(lambda x: of_the_file.weight.sum() * x)(X),
        "has called none of its models: of_the_file",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_cannot_be(name: str) -> None:
    sw.init(devices=2)
    wrong, message = REFUSED[name]
    with pytest.raises(sw.SettingError, match=message):
        wrong()


BY_ITSELF: dict[str, Callable[[sw.AutoParallel], Any]] = {
    "plan": lambda step: step.plan,
    "explain": lambda step: step.explain(),
    "whole": lambda step: step.whole(),
    "infer_layout": lambda step: step.infer_layout(X),
    "net": lambda step: step.net,
    "save_operator_strategy_file": lambda step: step.save_operator_strategy_file("plan.json"),
    "save_param_strategy_file": lambda step: step.save_param_strategy_file("parameters.txt"),
    "load_operator_strategy_file": lambda step: step.load_operator_strategy_file("plan.json"),
    "load_param_strategy_file": lambda step: step.load_param_strategy_file("parameters.txt"),
}


@pytest.mark.parametrize("name", BY_ITSELF)
def test_what_belongs_to_one_model_is_asked_of_it(name: str) -> None:
    sw.init(devices=2)
    step = sw.AutoParallel(calls_parts)
    with pytest.raises(sw.SettingError, match=r"critic, generator by themselves(.|\n)*step\.models\['critic'\] or"):
        BY_ITSELF[name](step)


def test_settings_reach_each_model_until_it_is_called() -> None:
    sw.init(devices=2)
    models = Gan()

    def step_function(x: torch.Tensor) -> torch.Tensor:
        return models.critic(models.generator(x))

    step = sw.AutoParallel(step_function).hsdp(threshold=0)
    step.models["critic"].hsdp(threshold=0, optimizer_level="level3")  # one model otherwise than the step
    step(X)
    levels = {name: part.settings.hsdp.optimizer_level for name, part in step.models.items()}
    assert levels == {"critic": "level3", "generator": "level1"}
    assert step.models["generator"].plan.parameters["weight"].storage.cuts == (2, 1)
    with pytest.raises(sw.SettingError, match="too late"):
        step.dataset_strategy("full_batch")
    assert {name for name, _ in step.named_parameters()} == {
        f"{model}.{name}" for model in ("critic", "generator") for name in ("weight", "bias")
    }
    step.eval()
    assert not models.critic.training and not models.generator.training
