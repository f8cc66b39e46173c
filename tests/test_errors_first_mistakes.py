"""Mistakes of a first hour with the package, and words of other systems: each error says what is meant here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_device import parallel
from small_networks import Marked, draw, labels
from test_recursive_programming import slow_devices
from torch import nn

import shardwright as sw

X, T = draw(16, 8), labels(16)
LOSS = nn.CrossEntropyLoss()


def plan(**given: Any) -> Any:
    return sw.plan(Marked(), (X,), LOSS, T, **given)


WORDS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "semi_auto_parallel": (
        lambda: sw.AutoParallel(Marked(), parallel_mode="semi_auto_parallel"),
        "semi_auto_parallel",
        '"semi_auto"',
    ),
    "auto_parallel": (lambda: plan(parallel_mode="auto_parallel"), "auto_parallel", '"dynamic_programming"'),
    "another spelling": (lambda: plan(parallel_mode="Semi-Auto"), "Semi-Auto", '"semi_auto"'),
    "a typing error": (lambda: plan(parallel_mode="dynamic_programing"), "dynamic_programing", '"dynamic_programming"'),
    "search_mode": (
        lambda: sw.AutoParallel(Marked(), search_mode="dynamic_programming"),
        "AutoParallel has no argument 'search_mode'",
        "parallel_mode=",
    ),
    "search_mode of plan": (
        lambda: plan(search_mode="recursive_programming"),
        "plan has no argument 'search_mode'",
        "parallel_mode=",
    ),
    "full_batch": (
        lambda: sw.AutoParallel(Marked(), full_batch=True),
        "no argument 'full_batch'",
        'model.dataset_strategy("full_batch")',
    ),
    "full_batch of plan": (lambda: plan(full_batch=True), "no argument 'full_batch'", 'dataset_strategy="full_batch"'),
    "full_batch of verify": (
        lambda: sw.verify(Marked(), X, full_batch=True),
        "no argument 'full_batch'",
        'dataset_strategy="full_batch"',
    ),
    "full_batch of the method": (
        lambda: sw.AutoParallel(Marked()).dataset_strategy(full_batch=True),
        "no argument 'full_batch'",
        '"full_batch"',
    ),
    "True as dataset_strategy": (
        lambda: sw.AutoParallel(Marked()).dataset_strategy(True),
        "unknown dataset_strategy True",
        "full_batch",
    ),
    "a method as an argument": (
        lambda: sw.AutoParallel(Marked(), pipeline_stages=2),
        "no argument 'pipeline_stages'",
        "model.pipeline(stages=2)",
    ),
    "devices": (lambda: sw.AutoParallel(Marked(), devices=8), "no argument 'devices'", "sw.init(devices=8)"),
    "an argument in another spelling": (
        lambda: plan(dataset_strategies="full_batch"),
        "no argument 'dataset_strategies'",
        "dataset_strategy=",
    ),
    "an argument of nobody": (lambda: sw.AutoParallel(Marked(), colour=3), "no argument 'colour'", "parallel_mode"),
    "nccl": (
        lambda: sw.init("nccl"),
        "init.devices='nccl'.: the first argument is the number of devices",
        "init(backend='nccl')",
    ),
    "a backend in another spelling": (
        lambda: sw.init(devices=8, backend="ncll"),
        "init.backend='ncll'.: there is no such backend",
        '"nccl"',
    ),
    "a launcher's word": (lambda: sw.init(device_num=8), "init has no argument 'device_num'", "devices="),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_of_other_systems(name: str) -> None:
    attempt, says, legal = WORDS[name]
    with pytest.raises(sw.SettingError, match=says) as raised:
        attempt()
    assert legal in raised.value.legal, raised.value.legal
    assert "did you mean" in raised.value.legal or name in ("an argument of nobody", "True as dataset_strategy")


def function(x: torch.Tensor) -> torch.Tensor:
    return x.relu()


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def hidden() -> nn.Module:
    """A parallel model that only the forward shows."""
    made = parallel(Marked())
    net = nn.Sequential(nn.Linear(8, 8, dtype=torch.float64))
    net.forward = lambda x: made(net[0](x))
    return net


MISTAKES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "no target": (
        lambda: parallel(Marked(), LOSS)(X),
        r"the target is missing: .* Marked.forward\(x.*none is left for CrossEntropyLoss",
        "model(x, target)",
    ),
    "no arguments": (lambda: parallel(Marked(), LOSS)(), "the target is missing", "model(x, target)"),
    "no target in plan": (lambda: sw.plan(Marked(), (X,), LOSS), "the target is missing: .* targets=None", "targets"),
    "a target and no loss": (
        lambda: parallel(Marked())(X, T),
        r"Marked.forward\(x.*does not take the last of the 2 arguments .*if it is a target, there is no loss_fn",
        "loss_fn=nn.CrossEntropyLoss()",
    ),
    "a target and no loss in plan": (lambda: sw.plan(Marked(), (X,), None, T), "targets without a loss_fn", "loss_fn"),
    "wrapped twice": (lambda: sw.AutoParallel(parallel(Marked())), "the model is wrapped twice", "once"),
    "wrapped inside": (
        lambda: sw.AutoParallel(Twice(parallel(Marked()))),
        "the module 'inner' of the model is an AutoParallel",
        "once, around the whole plain model",
    ),
    "called inside": (
        lambda: sw.plan(hidden(), (X,)),
        "a parallel Marked is called inside of the model",
        "the plain model inside",
    ),
    "a function": (
        lambda: sw.AutoParallel(function),
        r"function \(test_errors_first_mistakes.py:102\) is not an nn.Module, and no step function",
        "a step that calls the model by such a variable",
    ),
    "a class": (lambda: sw.AutoParallel(Marked), "is not an nn.Module", "a model"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_a_first_call(name: str) -> None:
    attempt, says, legal = MISTAKES[name]
    with pytest.raises(sw.ShardwrightError, match=says) as raised:
        attempt()
    assert legal in raised.value.legal, raised.value.legal


def test_a_forward_of_optional_arguments_is_called_as_it_likes() -> None:
    """The number of arguments alone decides: a loss that ignores its target, a second input that may be missing."""

    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, dtype=torch.float64)

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return self.layer(x) if mask is None else self.layer(x) * mask

    assert parallel(Optional())(X).shape == (16, 8) and parallel(Optional())(X, X).shape == (16, 8)
    sw.plan(Optional(), (X,), lambda y, _: y.sum())


def test_a_file_in_the_place_of_the_folder_for_dumps(tmp_path: Path) -> None:
    file = tmp_path / "dumps"
    file.write_text("")
    for path in (file, file / "deeper" / "still"):
        with pytest.raises(sw.SettingError, match="dumps is a file") as raised:
            sw.AutoParallel(Marked(), save_graphs=path)
        assert raised.value.legal == "a folder for the dumps"
    sw.AutoParallel(Marked(), save_graphs=tmp_path / "new" / "folder")


def test_a_model_without_values_that_is_called_by_itself() -> None:
    """The error comes before memory that nobody has written, and ends with the first parallel call."""
    with sw.no_init_parameters():
        net, other = Marked(), nn.Linear(8, 4, dtype=torch.float64)
    for called, module, name in (
        (net, "Marked", "w1"),
        (other, "Linear", "weight"),
        (nn.Sequential(other), "Linear", ""),
    ):
        with pytest.raises(sw.SettingError, match=f"{module} is called, and its parameter '{name}") as raised:
            called(X)
        assert "AutoParallel(net, …)" in raised.value.legal and raised.value.source.startswith(
            "test_errors_first_mistakes.py"
        )
    assert other(X.to("meta")).shape == (16, 4)  # shapes alone need no values
    sw.plan(net, (X,))
    parallel(net)(X)
    assert net(X).isfinite().all()
    parallel(nn.Sequential(other))(X)
    assert not nn.modules.module._global_forward_pre_hooks or net(X).isfinite().all()


# -- what is no mistake, but no gain either ----------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [None, "h100x8"])
def test_training_says_that_a_search_splits_nothing(cluster: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """The first call says so, and which cluster it was searched for, once."""
    sw.init(devices=8)
    model = sw.AutoParallel(nn.Linear(8, 8), nn.MSELoss(), parallel_mode="dynamic_programming", cluster=cluster)
    x = torch.zeros(16, 8)
    with pytest.warns(UserWarning, match="the search splits nothing, since on h100x8 messages would") as warned:
        model(x, x).backward()
    (text,) = [str(one.message) for one in warned]
    assert "each of the 8 devices does all the work" in text and Path(warned[0].filename) == Path(__file__)
    assert ("No cluster was named, so h100x8 is assumed: cluster= takes yours" in text) == (cluster is None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, x).backward()
    model.explain()
    shown = capsys.readouterr().out
    assert shown.startswith("dynamic_programming on 8 devices of h100x8: ")
    assert "cluster: h100x8, 8 by NVLink 4" in shown and "a step takes " in shown and "gap 0.000%" in shown


def test_training_is_silent_where_the_search_splits(recwarn: pytest.WarningsRecorder) -> None:
    sw.init(devices=4)
    net = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    model = sw.AutoParallel(net, nn.MSELoss(), parallel_mode="dynamic_programming", cluster=slow_devices(4))
    model(torch.zeros(64, 512), torch.zeros(64, 512)).backward()
    assert any(d.assignment.used for d in model.plan.decisions.values()) and not recwarn.list
    model = sw.AutoParallel(nn.Linear(8, 8), nn.MSELoss())
    model(torch.zeros(16, 8), torch.zeros(16, 8)).backward()
    assert not recwarn.list, "nothing was searched"
