"""`Any` in annotations: at most so many in each folder, and the reason for those."""

from __future__ import annotations

import ast
from collections import Counter

from paths import ROOT

PACKAGE = ROOT / "shardwright"

#: Folder -> the most names `Any` in its files, imports aside. `Any` stands where any value is meant: the context of a
#: `torch.autograd.Function` (a parameter ``ctx``), arguments and results of functions of torch's or a user's, values of
#: JSON, objects of torch without stubs. Elsewhere stands `object`, a Protocol, or the type itself. A folder that needs
#: fewer lowers its number.
MOST = {
    ".": 59,  # attributes and results of a user's model; arguments of an operator (`graph.Op`)
    "capture": 3,
    "capture/observed": 1,
    "checkpoint": 21,  # values of JSON; state of a user's objects
    "cli": 15,  # argparse, shtab
    "cost": 3,
    "integrations": 10,  # results of the library's own methods
    "json_files": 6,
    "launch": 3,
    "parallel": 14,  # results of a user's model
    "partition": 3,
    "pipeline": 4,
    "planfile": 9,  # values of JSON
    "rehearsal": 7,
    "report": 2,
    "rules": 18,  # contexts
    "rules/random_numbers": 12,  # words of 64 bits as one tensor or two
    "runtime": 45,  # contexts; nodes of torch.fx
    "runtime/distributed": 136,  # contexts; ``__torch_function__`` and the functions that it answers
    "runtime/local": 21,  # contexts
    "torch_private": 47,  # private objects of torch, which have no stubs
    "verification": 8,
}


def counted(tree: ast.Module) -> int:
    """The number of names `Any`, imports aside."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))


def test_any_is_not_more_than_is_meant() -> None:
    found: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        found[path.parent.relative_to(PACKAGE).as_posix()] += counted(ast.parse(path.read_text(encoding="utf-8")))
    assert {folder: count for folder, count in found.items() if count > MOST.get(folder, 0)} == {}


def test_any_is_counted() -> None:
    text = "from typing import Any\ndef f(x: Any, *y: dict[str, Any]) -> None: ...\nAnything = 1\n"
    assert counted(ast.parse(text)) == 2
