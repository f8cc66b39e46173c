"""Every public name has an example in its docstring, and the example runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import FLAGS
from torch import nn

import shardwright as sw
from shardwright.rules import registry

#: Names whose examples are on the page of errors, each with its cause and its cure.
ERRORS = {name for name in sw.__all__ if inspect.isclass(value := getattr(sw, name)) and issubclass(value, Exception)}
NAMES = [*sorted(set(sw.__all__) - ERRORS - {"__version__", "ops"}), *(f"ops.{name}" for name in sw.ops.__all__)]
#: Names of other libraries' loops; `Trainer` and `Seq2SeqTrainer` have the docstring of `TrainerMixin`.
LOOPS = ["hugging_face.TrainerMixin", "hugging_face.HuggingFaceMonitor", "accelerate.Accelerator"]
LOOPS += ["lightning.LightningMonitor"]


def run(example: str, names: dict[str, Any], name: str) -> None:
    test = doctest.DocTestParser().get_doctest(example, names, name, None, 0)
    message: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=message.append, clear_globs=False)
    assert not message, "".join(message)
    names.update(test.globs)


def example_of(value: Any) -> str:
    return (inspect.getdoc(value) or "").partition("\nExample:\n")[2]


@pytest.mark.parametrize("name", [*NAMES, *LOOPS])
def test_a_name_has_an_example_that_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of names says what `net`, `x` and the others are."""
    if name in LOOPS:
        module, _, last = name.partition(".")
        pytest.importorskip({"hugging_face": "transformers"}.get(module, module))
        value = getattr(importlib.import_module(f"shardwright.integrations.{module}"), last)
    else:
        value = operator.attrgetter(name)(sw)
    example = example_of(value)
    assert ">>>" in example and "+SKIP" not in example
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    sw.init(devices=8)
    torch.manual_seed(0)
    net, loss_fn = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), nn.CrossEntropyLoss()
    x, y = torch.randn(32, 16), torch.arange(32) % 8
    names = {"sw": sw, "torch": torch, "nn": nn, "net": net, "loss_fn": loss_fn, "x": x, "y": y}
    if "model" in example:
        names["model"] = sw.AutoParallel(net, loss_fn).dataset_strategy("full_batch")
        names["optimizer"] = torch.optim.AdamW(net.parameters())
    if "plan" in example:
        names["plan"] = sw.plan(net, (x,), loss_fn, y, parallel_mode="data_parallel", devices=8)
    run(example, names, name)
    for member in dir(value) if inspect.isclass(value) and name not in LOOPS else ():
        if not member.startswith("_") and ">>>" in (text := example_of(getattr(value, member))):
            run(text, names, f"{name}.{member}")
