"""The pages of docs/design and docs/from-mindspore.md: the picture of the layers, the names in backticks, the Python
blocks. CONTRIBUTING.md: its names."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from doc_pages import PYTHON, run
from paths import ROOT

import shardwright
from shardwright.planners.planning_problem import PLANNERS
from shardwright.rules import registry

DESIGN = ROOT / "docs" / "design"
FROM_MINDSPORE = ROOT / "docs" / "from-mindspore.md"
PAGES = [*sorted(DESIGN.glob("*.md")), FROM_MINDSPORE]
#: A page names a file from one of these folders.
FOLDERS = (ROOT, ROOT / "shardwright", ROOT / "tests", DESIGN)
#: Modules and folders at the top of the package.
MODULE_NAMES = {path.stem for path in (ROOT / "shardwright").glob("*.py")} | {
    path.parent.name for path in (ROOT / "shardwright").glob("*/__init__.py")
}
IN_BACKTICKS = re.compile(r"`([\w./-]+\.(?:py|md|toml))`")
DOTTED = re.compile(r"`([a-z_]+(?:\.\w+)+)(?:\(\))?`")


def missing(text: str) -> list[str]:
    """Files that a page names in backticks and that the repository lacks."""
    return [name for name in IN_BACKTICKS.findall(text) if not any((folder / name).is_file() for folder in FOLDERS)]


def unknown(text: str) -> list[str]:
    """Names such as `planning.PLANNERS` or `shardwright.rules.registry.find_rule` in backticks that the package lacks.

    The first part of such a name is `sw`, or a module or a folder of the package; other dotted names are not looked at.
    """
    wrong = []
    for name in DOTTED.findall(text):
        first, *rest = re.sub(r"^(shardwright|sw)\.", "", name).split(".")
        found: object
        if name.startswith("sw."):
            found, rest = shardwright, [first, *rest]
        elif name.endswith((".py", ".md", ".toml")) or first not in MODULE_NAMES or not rest:
            continue
        else:
            found = importlib.import_module(f"shardwright.{first}")
        for part in rest:
            if isinstance(found, ModuleType) and not hasattr(found, part):
                try:
                    importlib.import_module(f"{found.__name__}.{part}")
                except ModuleNotFoundError:
                    wrong.append(name)
                    break
            found = getattr(found, part, None)
            if found is None:
                wrong.append(name)
                break
    return wrong


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rules and the planners that a page adds are gone after it."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    before = dict(PLANNERS)
    yield
    PLANNERS.clear()
    PLANNERS.update(before)


def test_the_picture_of_the_layers_is_that_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(DESIGN), *sys.path])
    layers = importlib.import_module("layers")
    page = (DESIGN / "architecture.md").read_text(encoding="utf-8")
    between = page[page.index(layers.BEGIN) + len(layers.BEGIN) : page.index(layers.END)]
    assert between == layers.block(), "python docs/design/layers.py --write"


def test_the_table_of_the_layers_is_that_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of the table names one layer or several, in the order of the contract."""
    monkeypatch.setattr(sys, "path", [str(DESIGN), *sys.path])
    layers = importlib.import_module("layers")
    page = (DESIGN / "README.md").read_text(encoding="utf-8")
    rows = re.search(r"\| layer \| holds \|\n\|.*\|\n((?:\|.*\|\n)+)", page)
    assert rows is not None
    named = [name for row in rows[1].splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert named == [module for layer in layers.layers() for module in layer]


def test_the_number_of_files_and_lines_is_that_of_the_package() -> None:
    """Within 5 %: "about 93,000 lines in 259 files, 359 lines a file on average"."""
    page = (DESIGN / "README.md").read_text(encoding="utf-8")
    found = re.search(r"about ([\d,]+) lines in (\d+) files, (\d+) lines a file", page)
    assert found is not None
    files = list((ROOT / "shardwright").rglob("*.py"))
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    assert [int(number.replace(",", "")) for number in found.groups()] == pytest.approx(
        [lines, len(files), lines / len(files)], rel=0.05
    )


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda p: p.stem)
def test_every_name_in_backticks_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert missing(text) == []
    assert unknown(text) == []


def test_a_name_that_is_not_there_is_found() -> None:
    assert missing("`layout.py` and `no_such_file.py`") == ["no_such_file.py"]
    assert unknown("`sw.shard`, `sw.none`, `planning.make_plan`, `planning.no_such_name`, `rules.no_module.name`") == [
        "sw.none",
        "planning.no_such_name",
        "rules.no_module.name",
    ]


@pytest.mark.parametrize(
    "page", [p for p in PAGES if PYTHON.search(p.read_text(encoding="utf-8"))], ids=lambda p: p.stem
)
@pytest.mark.filterwarnings("ignore")
def test_the_blocks_of_a_page_run(page: Path, registered: None) -> None:
    run(page)
