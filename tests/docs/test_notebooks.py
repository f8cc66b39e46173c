"""The notebooks of the pages: each runs from top to bottom, and shows what its file says."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doc_pages import broken_links
from paths import DOCS

import shardwright as sw

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))

#: Rounding errors, which differ from one machine to the next.
ROUNDING = re.compile(r"\d\.\de[-+]\d\d( \([\w.]+\))?")


@pytest.fixture
def notebooks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that runs notebooks and makes pages of them."""
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    return importlib.import_module("notebooks")


def shown(notebook: dict[str, Any]) -> list[str]:
    """The outputs of each cell, without rounding errors."""
    return [ROUNDING.sub("#", json.dumps(cell["outputs"])) for cell in notebook["cells"] if "outputs" in cell]


def cell(source: str) -> dict[str, Any]:
    return {"cell_type": "code", "metadata": {}, "source": [source], "execution_count": None, "outputs": []}


def test_there_are_six() -> None:
    assert len(NOTEBOOKS) == 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_its_file_says(
    path: Path, notebooks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("IPython")
    monkeypatch.chdir(tmp_path)
    main, notebook = sys.modules["__main__"], notebooks.read(path)
    try:
        done = notebooks.run(notebook)
    finally:
        sw.init(devices=8)
    assert shown(done) == shown(notebook), "python docs/notebooks.py"
    assert path.read_text(encoding="utf-8") == notebooks.text(notebook)
    assert sys.modules["__main__"] is main and not hasattr(sys, "ps1"), "the run leaves nothing behind"


def test_a_cell_that_fails_is_named(notebooks: ModuleType) -> None:
    pytest.importorskip("IPython")
    with pytest.raises(RuntimeError, match="cell 2 fails") as caught:
        notebooks.run({"cells": [cell("a = 1"), cell("a.b")]})
    assert isinstance(caught.value.__cause__, AttributeError)


def test_what_a_cell_shows(notebooks: ModuleType) -> None:
    pytest.importorskip("IPython")
    source = "import shardwright as sw\nprint('said')\ndisplay(sw.Layout((2,), ('dp',)))\nsw.Layout((2,), ('mp',))"
    (done,) = notebooks.run({"cells": [cell(source)]})["cells"]
    kinds = [output["output_type"] for output in done["outputs"]]
    assert kinds == ["stream", "display_data", "execute_result"] and done["execution_count"] == 1
    text = notebooks.page(
        {"cells": [{"cell_type": "markdown", "source": ["# Title\n", "\n", "Words."]}, done]}, "a.ipynb"
    )
    assert text.startswith("# Title\n\nThis page is a notebook: {download}`a.ipynb <a.ipynb>`.")
    assert "```text\nsaid\n```" in text and '<div class="output"><div><b>Layout((2,), (' in text


def test_a_line_of_a_cell_has_the_number_beside_it(notebooks: ModuleType) -> None:
    pytest.importorskip("IPython")
    source = "import shardwright as sw, torch\n\nmark = sw.shard(torch.relu, ((2,),))\nmark.source"
    *_, done = notebooks.run({"cells": [cell("1"), cell(source)]})["cells"]
    assert done["outputs"][0]["data"]["text/plain"] == ["'In[2]:3'"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(path: Path, notebooks: ModuleType, tmp_path: Path) -> None:
    texts = ["".join(cell["source"]) for cell in notebooks.read(path)["cells"] if cell["cell_type"] == "markdown"]
    page = path.with_suffix(".md")
    written = tmp_path / page.name
    written.write_text("\n\n".join(texts).replace("](", f"]({page.parent.as_posix()}/"), encoding="utf-8")
    assert texts[0].startswith("# ") and broken_links(written) == []
