"""Plans that name what this process does not have, or unpack to more than they should: refused, nothing imported."""

from __future__ import annotations

import base64
import enum
import json
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_documents import made
from torch import nn

import shardwright as sw
from shardwright.planfile import encoding
from shardwright.planfile.document_writer import written
from shardwright.planfile.encoding import LONGEST, fingerprint_of, packed, unpacked
from shardwright.torch_private import pytree

MODULE = "imported_by_a_plan"


class Mood(enum.Enum):
    GOOD = 1


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that can be imported, and is not."""
    lines = "import enum, torch", "class Mood(enum.Enum): GOOD = 1", "class Other(torch.autograd.Function): pass"
    (tmp_path / f"{MODULE}.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield MODULE
    sys.modules.pop(MODULE, None)


def changed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """A plan whose graph is changed, under the fingerprint of what it is now."""
    words = json.loads(written(made("tutorial")))
    held = unpacked(words["captured"])
    change(held["graph"])
    words.update(captured=packed(held), graph=fingerprint_of(held["graph"]))
    path.write_text(json.dumps(words, indent=1))


def nested(tree: Any, old: str, new: str) -> Callable[[dict[str, Any]], Any]:
    text = pytree.treespec_dumps(pytree.tree_structure(tree))
    assert old in text
    return lambda graph: graph.update(in_spec=text.replace(old, new))


def enum_in_the_nesting(graph: dict[str, Any]) -> None:
    nested({Mood.GOOD: 1}, __name__, MODULE)(graph)


def default_in_the_nesting(graph: dict[str, Any]) -> None:
    nested(defaultdict(list, a=1), '"default_factory_module": "builtins"', f'"default_factory_module": "{MODULE}"')(
        graph
    )


def function_of_a_user(graph: dict[str, Any]) -> None:
    graph["ops"][0]["target"] = {
        "function": f"{MODULE}:Other",
        "leaves": [],
        "places": [],
        "spec": None,
        "differentiable": [],
    }


def operator_that_imports(graph: dict[str, Any]) -> None:
    graph["ops"][0]["target"] = f"import_module.{MODULE}.__call__"


def dtype_that_torch_imports(graph: dict[str, Any]) -> None:
    graph["values"][next(iter(graph["values"]))][1] = "_inductor"


@pytest.mark.parametrize(
    "change, says",
    [
        (enum_in_the_nesting, f"names the Enum 'Mood' of the module '{MODULE}', which is not imported here"),
        (default_in_the_nesting, f"names the dict 'list' of the module '{MODULE}', which is not imported here"),
        (function_of_a_user, f"there is no torch.autograd.Function Other in the module {MODULE}"),
        (operator_that_imports, f"there is no operator import_module.{MODULE}.__call__ in this process"),
        (dtype_that_torch_imports, "torch has no dtype '_inductor'"),
    ],
)
def test_reading_imports_nothing(change: Callable, says: str, module: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    changed(path, change)
    before = set(sys.modules)
    with pytest.raises(sw.PlanError) as caught:
        sw.Plan.load(path)
    assert says in str(caught.value) and caught.value.legal
    assert "no operator" not in says or "a command takes --import MODULE" in caught.value.legal
    assert module not in sys.modules and not {name for name in set(sys.modules) - before if "inductor" in name}


def test_classes_that_are_there_are_found(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for tree in ({Mood.GOOD: 1}, defaultdict(list, a=1), [{"a": (1, 2)}]):
        spec = pytree.tree_structure(tree)
        changed(path, lambda graph, spec=spec: graph.update(in_spec=pytree.treespec_dumps(spec)))
        assert sw.Plan.load(path).graph.in_spec == spec


def test_a_module_that_imports_at_the_first_use_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    lazy = type(sys)("lazy_module")
    lazy.__getattr__ = lambda name: asked.append(name)  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    changed(tmp_path / "plan.json", nested({Mood.GOOD: 1}, __name__, "lazy_module"))
    with pytest.raises(sw.PlanError, match="not imported here"):
        sw.Plan.load(tmp_path / "plan.json")
    assert not asked


def test_a_plan_that_unpacks_to_gigabytes(tmp_path: Path) -> None:
    path, words = tmp_path / "plan.json", json.loads(written(made("tutorial")))
    packer = zlib.compressobj(9)
    head = packer.compress(b"") + packer.flush(zlib.Z_FULL_FLUSH)
    blanks = packer.compress(b" " * (1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)  # as they are again and again
    words["captured"] = base64.b64encode(head + blanks * (3 << 10)).decode()  # 3 GiB
    path.write_text(json.dumps(words))
    assert 3e6 < path.stat().st_size < 5e6
    before = _peak()
    with pytest.raises(sw.PlanError, match=rf"more than {LONGEST:,} bytes when it is unpacked(.|\n)*at most 64 MiB"):
        sw.Plan.load(path)
    assert _peak() - before < 1 << 29


def _peak() -> int:
    """Bytes that this process has held at the most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


@pytest.mark.parametrize(
    "captured, says",
    [
        (b"{}", "Plan.save writes no such graph"),
        (b"[" * 1000, "more than 100 deep"),
        (b'{"graph": 1, "graph": 2}', 'at graph: "graph" stands twice'),
        (b"\xff", "the captured graph cannot be read: 'utf-8' codec"),
    ],
)
def test_captured_lines(captured: bytes, says: str, tmp_path: Path) -> None:
    path, words = tmp_path / "plan.json", json.loads(written(made("tutorial")))
    words["captured"] = base64.b64encode(zlib.compress(captured)).decode()
    path.write_text(json.dumps(words))
    with pytest.raises(sw.PlanError) as caught:
        sw.Plan.load(path)
    assert says in str(caught.value) and caught.value.source == str(path)


def test_the_fingerprint_is_compared_before_the_graph_is_interpreted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, words = tmp_path / "plan.json", json.loads(written(made("tutorial")))
    held = unpacked(words["captured"])
    held["graph"]["ops"][0]["name"] = "another"
    words["captured"] = packed(held)
    path.write_text(json.dumps(words))
    monkeypatch.setattr(encoding, "_graph", lambda *given: pytest.fail("interpreted"))
    with pytest.raises(sw.PlanError, match=f"the captured graph is .*, the plan is of '{words['graph']}'"):
        sw.Plan.load(path)


@pytest.mark.parametrize("field, value", [("devices", 10**9), ("devices", 10**50), ("devices", True), ("devices", 8.0)])
def test_numbers_that_no_cluster_has(field: str, value: Any, tmp_path: Path) -> None:
    path, words = tmp_path / "plan.json", json.loads(written(made("tutorial")))
    path.write_text(json.dumps(words | {field: value}))
    with pytest.raises(sw.PlanError, match="devices: .*\n  legal: a whole number from 1 to 1,048,576"):
        sw.Plan.load(path)


def test_what_a_model_was_given_comes_back(tmp_path: Path) -> None:
    """An enum in the input of a real model, whose plan is saved and read."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: dict[Any, torch.Tensor]) -> torch.Tensor:
            return self.layer(x["a"])

    plan = sw.plan(Net(), ({"a": torch.empty(8, 4)},), devices=4)
    plan.save(tmp_path / "plan.json")
    assert sw.Plan.load(tmp_path / "plan.json").graph.in_spec == plan.graph.in_spec
