"""Help and completion of the public names, as an editor or a prompt shows them."""

from __future__ import annotations

import inspect
import pydoc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import shardwright as sw
from shardwright.planners.planning_problem import modes


def test_help_names_all_modes() -> None:
    for asked in (sw.AutoParallel, sw.plan):
        text = pydoc.render_doc(asked, renderer=pydoc.plaintext)
        assert [mode for mode in modes() if mode not in text] == []


def test_a_function_is_a_function() -> None:
    """Its signature names its arguments, so that an editor shows them."""
    assert inspect.isfunction(sw.plan)
    assert {"net", "inputs", "parallel_mode", "devices", "cluster"} <= set(inspect.signature(sw.plan).parameters)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for prompt in ("ps1", "ps2", "ps3"):  # an interactive shell gives them to `sys`; afterwards they are as before
        monkeypatch.setattr(sys, prompt, "", raising=False)
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    pytest.importorskip("jedi")
    main = sys.modules["__main__"]
    made = interactive.InteractiveShell()
    yield made
    made.restore_sys_module_state()
    assert sys.modules["__main__"] is main


def test_ipython_completes_names_methods_and_arguments(shell: Any) -> None:
    from IPython.core.completer import provisionalcompleter

    shell.run_cell("import torch, shardwright as sw\nmodel = sw.AutoParallel(torch.nn.ReLU())", silent=True)

    def completed(text: str) -> list[str]:
        with provisionalcompleter():
            return [found.text for found in shell.Completer.completions(text, len(text))]

    assert {"AutoParallel"} <= {text.rpartition(".")[2] for text in completed("sw.Auto")}
    assert any(text.rpartition(".")[2].startswith("dataset_strategy") for text in completed("model.dataset"))
    assert "parallel_mode=" in completed("sw.AutoParallel(parallel_m")
    assert "devices=" in completed("sw.plan(devi")
