"""The layers of the package, checked on the tree that `docs/design/tree.json` describes.

The file says for each file of the target tree which of today's files it is made of. Every import of today, those inside
functions and those for type checkers too, is carried over to the target tree: none may run upwards, none may close a circle.
"""

from __future__ import annotations

import ast
import json
from collections import Counter, defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardwright"
TREE = json.loads((ROOT / "docs" / "design" / "tree.json").read_text(encoding="utf-8"))
TARGET = {old: new for new, olds in TREE["files"].items() for old in olds}
#: `sw.plan`'s package today; only re-exports names, and goes.
GOES = "plan/__init__.py"


def file_of(parts: tuple[str, ...]) -> str | None:
    """The package's file of a dotted module, relative to the package; None where there is none."""
    path = "/".join(parts)
    for name in (f"{path}.py", f"{path}/__init__.py".lstrip("/")):
        if (PACKAGE / name).is_file():
            return name
    return None


def imports_of(name: str) -> dict[str, set[str]]:
    """File that is imported -> the imported names; `name` is the importing file, relative to the package."""
    here = tuple(Path(name).parent.parts)
    out: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(ast.parse((PACKAGE / name).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = tuple(node.module.split(".")) if node.module else ()
        if node.level:
            base = here[:len(here) - node.level + 1] + module
        elif module[:1] == ("shardwright",):
            base = module[1:]
        else:
            continue
        for alias in node.names:
            out[file_of((*base, alias.name)) or file_of(base) or ""].add(alias.name)
    return out


def edges() -> dict[str, dict[str, list[str]]]:
    """Importing file of the target tree -> imported file -> how today's files say it."""
    out: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for old, new in TARGET.items():
        for imported, names in imports_of(old).items():
            target = TARGET["plan/make.py"] if imported == GOES else TARGET[imported]
            if target != new and "__init__.py" not in (old, imported):
                out[new][target].append(f"{old} imports {', '.join(sorted(names))} from {imported}")
    return out


def layer(name: str) -> int:
    """The floor of a file of the target tree; 0 is the highest. The longest prefix of its path decides."""
    found = [(len(entry), floor) for floor, entries in enumerate(TREE["layers"]) for entry in entries
             if name == f"{entry}.py" or name.startswith(f"{entry}/")]
    return max(found)[1]


def test_every_file_has_one_place_in_the_tree():
    today = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py")} - {GOES}
    placed = Counter(old for olds in TREE["files"].values() for old in olds)
    assert today == set(placed)
    assert {old: count for old, count in placed.items() if count > 1} == {}


def test_no_import_runs_upwards():
    upward = [line for importer, found in edges().items() if importer not in ("__init__.py", "__main__.py")
              for target, lines in found.items() if layer(target) < layer(importer) for line in lines]
    assert upward == []


def test_no_imports_run_in_a_circle():
    TopologicalSorter({importer: set(found) for importer, found in edges().items()}).prepare()  # CycleError names one


def test_no_file_of_the_tree_is_above_700_lines():
    lines = {name: sum(len((PACKAGE / old).read_text(encoding="utf-8").splitlines()) for old in olds)
             for name, olds in TREE["files"].items()}
    assert {name: count for name, count in lines.items() if count > 700} == {}


def test_base_names_stand_once():
    names = Counter(Path(name).name for name in TREE["files"])
    assert {name for name, count in names.items() if count > 1} == {"__init__.py"}


def test_public_classes_of_the_tree_have_one_meaning_each():
    names = Counter(
        TREE["renames"].get(old, {}).get(node.name, node.name)
        for old in TARGET for node in ast.parse((PACKAGE / old).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    assert {name for name, count in names.items() if count > 1} == set()
