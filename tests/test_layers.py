"""The layers of the package (`[tool.importlinter]` in pyproject.toml), and what else holds for every file of its
tree."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardwright"
FILES = sorted(PACKAGE.rglob("*.py"))
#: Where `torch.distributed` may be imported: what runs on ranks, and what starts, joins or stores for them.
ON_RANKS = (
    "runtime/",
    "checkpoint/",
    "launch/",
    "integrations/",
    "parallel/",
    "cli/",
    "process.py",
    "ops.py",
    "torch_private.py",
    "pipeline/schedules.py",
)  # takes the orders of torch's own schedules; needs no process group
#: Files that read or set variables of the environment. `launch.environment` says what they mean.
OF_ENVIRONMENT = {
    "launch/run.py",
    "launch/agent.py",
    "process.py",
    "cli/script.py",
    "runtime/distributed/shared_memory.py",
    "runtime/freed.py",
}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> set[str]:
    """The modules that a file imports from other packages, those inside of functions too."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def contract_holds(config: Path) -> bool:
    return lint_imports(config_filename=str(config), no_cache=True) == 0


def test_imports_run_downwards_and_in_no_circle(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    assert contract_holds(ROOT / "pyproject.toml"), capsys.readouterr().out


def test_an_import_upwards_is_found(tmp_path, monkeypatch, capsys):
    """The contract fails on a package of two layers whose lower one imports the higher one."""
    package = tmp_path / "upside"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "high.py").write_text("")
    (package / "low.py").write_text("def late():\n    from . import high\n")
    (tmp_path / "contract.toml").write_text(
        '[tool.importlinter]\nroot_package = "upside"\n[[tool.importlinter.contracts]]\nname = "layers"\ntype = "layers"\n'
        'containers = ["upside"]\nlayers = ["high", "low"]\n'
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert not contract_holds(tmp_path / "contract.toml")
    assert "upside.low -> upside.high" in capsys.readouterr().out


def test_planning_does_not_know_torch_distributed():
    found = {
        str(path.relative_to(PACKAGE)): sorted(names)
        for path in FILES
        if not str(path.relative_to(PACKAGE)).startswith(ON_RANKS)
        and (names := {name for name in imported(path) if name.startswith("torch.distributed")})
    }
    assert found == {}


def test_variables_of_the_environment_are_read_in_few_files():
    found = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in ast.walk(tree_of(path))
        )
    }
    assert found == OF_ENVIRONMENT


def test_no_file_is_above_700_lines():
    lines = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in FILES}
    assert {name: count for name, count in lines.items() if count > 700} == {}


def test_no_folder_has_more_than_20_files():
    folders = Counter(path.parent for path in FILES)
    assert {folder: count for folder, count in folders.items() if count > 20} == {}


def test_base_names_stand_once():
    names = Counter(path.name for path in FILES)
    assert {name for name, count in names.items() if count > 1} == {"__init__.py"}


def test_public_classes_have_one_meaning_each():
    names = Counter(
        node.name
        for path in FILES
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == set()


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES} - {PACKAGE}), ids=lambda p: p.name)
def test_a_folder_says_what_its_files_hold(folder):
    """The docstring of the folder names each of its modules."""
    doc = ast.get_docstring(tree_of(folder / "__init__.py")) or ""
    assert [
        path.stem
        for path in sorted(folder.glob("*.py"))
        if path.stem != "__init__" and not re.search(rf"\b{path.stem}\b", doc)
    ] == []
