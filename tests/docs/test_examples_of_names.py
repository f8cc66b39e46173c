"""Every public name has an example in its docstring, and the example runs."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import pytest
import torch
from doc_pages import FLAGS
from torch import nn

import shardwright as sw
from shardwright.rules import registry

#: Names whose examples are on the page of errors, each with its cause and its cure.
ERRORS = {name for name in sw.__all__ if inspect.isclass(value := getattr(sw, name)) and issubclass(value, Exception)}
NAMES = sorted(set(sw.__all__) - ERRORS - {"__version__", "ops"})


@pytest.mark.parametrize("name", NAMES)
def test_a_name_has_an_example_that_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of names says what `net`, `x` and the others are."""
    text = inspect.getdoc(getattr(sw, name)) or ""
    assert "\nExample:\n" in text and ">>>" in text and "+SKIP" not in text
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    sw.init(devices=8)
    torch.manual_seed(0)
    net, loss_fn = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), nn.CrossEntropyLoss()
    x, y = torch.randn(32, 16), torch.arange(32) % 8
    names = {"sw": sw, "torch": torch, "nn": nn, "net": net, "loss_fn": loss_fn, "x": x, "y": y}
    example = text.split("\nExample:\n")[1]
    if "model" in example:
        names["model"] = sw.AutoParallel(net, loss_fn).dataset_strategy("full_batch")
        names["optimizer"] = torch.optim.AdamW(net.parameters())
    if "plan" in example:
        names["plan"] = sw.plan(net, (x,), loss_fn, y, parallel_mode="data_parallel", devices=8)
    test = doctest.DocTestParser().get_doctest(example, names, name, None, 0)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append)
    assert not said, "".join(said)
