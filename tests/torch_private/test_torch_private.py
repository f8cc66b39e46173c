"""Private names of torch stand in one folder, and a version of torch that lacks one says so where the name is used."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import fresh
from torch.utils import checkpoint

import shardwright as sw
from shardwright import torch_private

PACKAGE = Path(sw.__file__).parent
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent.name != "torch_private")
LOOKUP = torch_private.version_lookup

#: Private by their spelling alone: names of Python's own library.
PYTHONS = {
    "_value_",
    "_asdict",
    "_current_frames",
    "_exit",
    "_fields",
    "_getframe",
    "_inst",
    "_replace",
    "_SubParsersAction",
}

#: And of other libraries: numpy's generator, and what accelerate and Lightning have.
OTHERS = {"_rand", "_dataloaders", "_accelerator_connector"}

#: Methods that torch documents for subclasses of its elastic agents.
EXTENDED = {"_monitor_workers", "_shutdown", "_start_workers"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


@lru_cache(maxsize=1)
def own_names() -> set[str]:
    """Names that the package defines or sets itself."""
    own = set()
    for path in FILES:
        for node in nodes_of(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("self", "cls")
            ):
                own.add(node.attr)
            elif (
                isinstance(node, ast.Subscript)
                and isinstance(node.slice, ast.Constant)
                and ast.unparse(node.value) == "self.__dict__"
            ):
                own.add(node.slice.value)
    return own


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes_of(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def uses(tree: ast.Module, own: set[str]) -> list[tuple[int, str]]:
    """Lines with private names that are neither the package's nor Python's."""
    found = []
    known = own | PYTHONS | OTHERS | EXTENDED
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and len(node.args) > 1
            and node.func.id in ("getattr", "setattr", "hasattr", "delattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            names = [node.args[1].value]
        else:
            continue
        found += [(node.lineno, name) for name in names if is_private(name) and name not in known]
    return found


@lru_cache(maxsize=1)
def names_of_torch() -> set[str]:
    """Private names of torch's objects that a text may name: attributes of modules, tensors, optimizers, operators.
    Names of ATen's operators, which schemas spell, do not count."""
    objects = (torch.nn.Module(), torch.nn.LSTM(1, 1), torch.ones(1), torch.optim.SGD([torch.ones(1)], 1.0))
    objects += (torch.nn.modules.module, torch.ops.aten.add.Tensor, torch.fx.Graph(), torch.fx.GraphModule)
    names = {name for held in objects for name in dir(held) if is_private(name) and name.strip("_")} - PYTHONS
    return {name for name in names if not hasattr(torch.ops.aten, name)}


def texts(tree: ast.Module) -> list[tuple[int, str]]:
    """Lines with texts that are private names of torch, or that begin one: ``vars(module)["_parameters"]``,
    ``getattr(module, f"_global{kind}")``."""
    joined = [node for node in nodes_of(tree) if isinstance(node, ast.JoinedStr) and node.values]
    parts = {part for node in joined for part in node.values}
    found = [
        (node.lineno, node.value)
        for node in nodes_of(tree)
        if isinstance(node, ast.Constant)
        and node not in parts
        and isinstance(node.value, str)
        and node.value in names_of_torch()
    ]
    begins = [(node.lineno, node.values[0].value) for node in joined if isinstance(node.values[0], ast.Constant)]
    return found + [
        (line, begin)
        for line, begin in begins
        if begin[:1] == "_" and begin.strip("_") and any(name.startswith(begin) for name in names_of_torch())
    ]


def test_private_names_stand_in_one_folder() -> None:
    own = own_names()
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path in FILES
        for line, name in [*uses(tree_of(path), own), *texts(tree_of(path))]
    ]
    assert not found, "private names belong into torch_private, behind functions"
    for path in FILES:
        # Whatever the tree hides: in docstrings, in strings of paths.
        assert not re.search(r"\btorch\.(?:\w+\.)*_[a-z]", path.read_text()), path


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch._dynamo", "_dynamo"),
        ("from torch.utils import _pytree as pytree", "_pytree"),
        ("from torch._subclasses import FakeTensor", "_subclasses"),
        ("torch._C", "_C"),
        ("x._base", "_base"),
        ("getattr(x, '_base', None)", "_base"),
        ("torch.ops.aten._softmax.default", "_softmax"),
    ],
)
def test_the_search_finds(text: str, name: str) -> None:
    assert name in [found for _, found in uses(ast.parse(text), own_names())]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("TABLES = ('_parameters', 'x')", "_parameters"),
        ("vars(module)['_forward_hooks']", "_forward_hooks"),
        ("getattr(nn.modules.module, f'_global{kind}')", "_global"),
        ("if key == '_flat_weights': pass", "_flat_weights"),
    ],
)
def test_the_search_finds_texts(text: str, name: str) -> None:
    assert [found for _, found in texts(ast.parse(text))] == [name]
    assert not texts(ast.parse("f'_{x}'; '_own'; f'{x}_parameters'; 'torch'"))


def test_every_name_is_there_in_this_version() -> None:
    torch_private.demand(*torch_private.NAMES)
    assert (
        torch_private.schema_of(torch.ops.aten.add.Tensor).name == "aten::add" and torch_private.schema_of(len) is None
    )
    assert torch_private.overload_name(torch.ops.aten.add.Tensor) == "Tensor" and not torch_private.overload_name(len)
    assert torch_private.torch_function("relu") is torch.relu and torch_private.torch_function("nothing") is None
    assert len(torch_private.fused_optimizers()) == 4
    for name in torch_private.MODULE_TABLES:
        assert name in vars(torch.nn.Module())
    proxies = torch.fx.proxy
    for tracer, name in ((proxies.TracerBase, "_filter_traceback_frames"), (proxies, "CapturedTraceback")):
        before = inspect.getattr_static(tracer, name)
        with torch_private.stack_lines(len, len):
            assert inspect.getattr_static(tracer, name) is len
        assert inspect.getattr_static(tracer, name) is before


def test_what_a_capture_leaves_out_is_put_back() -> None:
    tracing = importlib.import_module("torch.fx.experimental.proxy_tensor")
    fakes = importlib.import_module("torch._subclasses.fake_tensor")
    places = [(torch.fx.GraphModule, "recompile"), (tracing, "_extract_tensor_metadata"), (fakes, "traceback")]
    before = [vars(owner)[name] for owner, name in places]
    with pytest.raises(KeyError), torch_private.code_written_late(), torch_private.layouts_unrecorded():
        assert not any(vars(owner)[name] is was for (owner, name), was in zip(places, before))
        raise KeyError
    assert all(vars(owner)[name] is was for (owner, name), was in zip(places, before))


def test_operators_are_stopped_above_autograd_and_go_on_afterwards() -> None:
    seen, x = [], torch.ones(2, 3, requires_grad=True)

    def handle(target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        seen.append((str(target), [type(a).__name__ for a in args], torch.compiler.is_exporting()))
        with beneath():
            return target(*args, **kwargs)

    with pytest.raises(KeyError), torch_private.exporting(), torch_private.called_above_autograd(handle) as beneath:
        y = torch.nn.functional.linear(x, x, bias=x[:, 0]).t()
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.functional.linear(x, x)
        torch.arange(3, device="cpu")
        raise KeyError
    assert seen == [
        ("aten.select.int", ["Tensor", "int", "int"], True),
        ("aten.linear.default", ["Tensor", "Tensor", "Tensor"], True),
        ("aten.t.default", ["Tensor"], True),
        ("aten.linear.default", ["Tensor", "Tensor"], True),
        ("aten.arange.default", ["int"], True),
    ]
    assert y.grad_fn is not None and not torch.compiler.is_exporting() and not torch.compiler.is_compiling()
    torch.ones(2).add(1)
    assert len(seen) == 5


def test_code_that_is_written_late_runs() -> None:
    class Twice(torch.nn.Module):
        def forward(self, x):
            return x + x

    with torch_private.code_written_late():
        made = torch.fx.symbolic_trace(Twice())
        inside = made(torch.ones(2))
        late = torch.fx.GraphModule(made, made.graph)
    assert inside.tolist() == late(torch.ones(2)).tolist() == late(torch.ones(2)).tolist() == [2, 2]
    assert "def forward" in late.code


LACKING = """
import pkgutil, sys, warnings
import torch
from importlib import import_module
from shardwright import torch_private
torch_private.version_lookup.lookup = lambda path: None  # a torch without any of them
import shardwright as sw
for module in pkgutil.walk_packages(sw.__path__, "shardwright."):
    if not module.name.endswith("__main__") and ".integrations." not in module.name:  # these need their libraries
        import_module(module.name)
sw.init(devices=2)
try:
    sw.plan(torch.nn.Linear(4, 4), (torch.ones(4, 4),), devices=2)
except sw.TorchVersionError as error:
    print(error)
"""


def test_the_package_is_imported_without_any_of_them() -> None:
    """The functions ask torch at each call; what is imported as a name is looked up here as if torch had nothing."""
    run = fresh(LACKING, cwd=PACKAGE.parent)
    assert not run.returncode, run.stderr
    assert run.stdout.startswith(f"torch {torch.__version__} has no torch.") and "legal: a version" in run.stdout


@pytest.fixture()
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOOKUP, "lookup", lambda path: None)
    monkeypatch.setattr(LOOKUP, "LOOKED_UP", {})


def test_a_missing_name_says_so_where_it_is_used(lacking: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = torch_private.TorchDispatchMode
    message = re.escape(
        f"torch {torch.__version__} has no torch.utils._python_dispatch.TorchDispatchMode, which this feature "
        "needs: seeing what operators dispatch to"
    )

    class Watch(mode):
        pass

    for use in (mode, Watch, lambda: mode.name, lambda: torch_private.demand("TorchDispatchMode")):
        with pytest.raises(sw.TorchVersionError, match=message):
            use()
    assert not isinstance(1, mode) and mode != Watch and len({mode, Watch}) == 2
    for call, feature in (
        (torch_private.default_store, "watching the ranks"),
        (torch_private.number_of_groups, "pipelines on ranks"),
        (lambda: torch_private.worker_processes(object()), "`shardwright run`"),
        (lambda: torch_private.version_of(1), "changed in place"),
    ):
        with pytest.raises(sw.TorchVersionError, match=feature):
            call()
    assert torch_private.operators("_softmax.default") == () and not torch_private.fused_optimizers()
    assert torch_private.torch_function("relu") is None


def test_checkpoints_are_seen_where_torch_wraps_them_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(function, *args, **kwargs):
        return function(*args)

    before = dict(vars(checkpoint.checkpoint.__wrapped__))
    with torch_private.in_place_of_checkpoint(lambda function, x: ("ours", x)):
        assert checkpoint.checkpoint(abs, 1) == ("ours", 1)
    assert vars(checkpoint.checkpoint.__wrapped__) == before
    monkeypatch.setattr(checkpoint, "checkpoint", other)
    with (
        pytest.warns(
            UserWarning, match=f"torch {re.escape(torch.__version__)} calls torch.utils.checkpoint in another way"
        ),
        torch_private.in_place_of_checkpoint(lambda function, x: ("ours", x)),
    ):
        assert checkpoint.checkpoint(abs, 1) == ("ours", 1)
    assert checkpoint.checkpoint is other


def test_every_feature_is_named() -> None:
    for _name, (path, feature) in torch_private.NAMES.items():
        assert path.startswith("torch.") and feature
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        torch_private.nothing
    for module in pkgutil.walk_packages(sw.__path__, "shardwright."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
