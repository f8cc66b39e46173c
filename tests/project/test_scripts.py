"""Scripts that no other test runs whole: whatever they import is there."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from paths import BENCHMARKS, EXAMPLES, SUPPORT

SCRIPTS = [*sorted(BENCHMARKS.glob("*.py")), *sorted(EXAMPLES.glob("*.py"))]


def defined(path: Path) -> set[str]:
    """The names that a module defines or imports at its top."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports_of_a_script_are_there(script: Path) -> None:
    missing = []
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        names = {alias.name for alias in node.names}
        if node.module.split(".")[0] == "shardwright":
            module = importlib.import_module(node.module)
            missing += [f"{node.module}.{name}" for name in names if not has(module, name)]
            continue
        for folder in (script.parent, EXAMPLES, SUPPORT):  # in the order in which scripts find modules
            if (folder / f"{node.module}.py").exists():
                missing += [f"{node.module}.{name}" for name in names - defined(folder / f"{node.module}.py")]
                break
        else:
            missing += [] if importlib.util.find_spec(node.module) else [node.module]
    assert missing == []


def has(module: object, name: str) -> bool:
    """True where a module has a name, or a submodule of that name."""
    return hasattr(module, name) or importlib.util.find_spec(f"{module.__name__}.{name}") is not None
