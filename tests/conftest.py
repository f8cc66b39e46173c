"""Setup that every test file shares: threads, hypothesis profiles, the goldens."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch is imported, and inherited by the worker processes that tests start: a rank is one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ranks are forked and talk over Gloo, on machines with GPUs too.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# Neither they nor the second process of pytest-xdist compile the package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import hypothesis
import pytest

if TYPE_CHECKING:
    import torch

# Some test files take networks and helpers from one another; base names stand once below this folder.
sys.path += sorted({str(path.parent) for path in Path(__file__).parent.rglob("test_*.py")})

# A forked process has no use for a collection of what it inherited: the walk would write to the header of each object,
# and so copy every page.
os.register_at_fork(after_in_child=gc.freeze)

# The garbage of whole captures goes seldom: all that lives (graphs, plans, libraries) is walked each time. The default
# had a sixth of the time of the tests that plan. Young objects still go soon, while they are in the caches of a core.
gc.set_threshold(3000, 20, 100)

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def no_runtime_of_another_test():
    """A test that calls `sw.init`, or a command that is told ``--devices``, does not decide where the next one runs."""
    reported = os.environ.get("SHARDWRIGHT_DEVICES")
    yield
    os.environ.pop("SHARDWRIGHT_DEVICES", None)
    if reported is not None:
        os.environ["SHARDWRIGHT_DEVICES"] = reported
    runtime = sys.modules.get("shardwright.process_runtime")
    if runtime is not None:
        runtime._current.clear()


@pytest.fixture
def small_disk(tmp_path):
    """``small_disk(nbytes)``: a folder on a file system of its own that has room for so many bytes."""
    mounted = []

    def made(nbytes: int) -> Path:
        folder = tmp_path / f"small_disk_{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except FileNotFoundError:
            pytest.skip("no disk can be made full here: there is no command mount")
        if done.returncode:
            pytest.skip(f"no disk can be made full here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield made
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, timeout=30)


#: Files whose tests take longest together, the longest first: handed out at the end, one of them would keep one process
#: of pytest-xdist busy while the others have nothing left to do. Another order costs time alone.
LONGEST = (
    "stage_weights",
    "pipeline_p2p",
    "scheduled_collectives",
    "scheduled_collectives_compiled",
    "autocast_lists",
    "recapture",
    "graph_cache",
    "rules_every_rule",
    "html_report",
    "second_derivatives",
    "optimizer_steps",
    "mixed_precision_processes",
    "plan_command",
    "types",
    "rules_every_module",
    "loss",
    "accelerators_models",
    "search_memory",
    "operator_explanation",
    "plan_command_large",
    "search_space",
    "pipeline_p2p_links",
    "rehearse",
    "iopddl",
    "json_reader_mutations",
    "train_step",
    "description",
    "gradient_edits",
    "watchdog",
    "gradient_sums",
    "solve_memory_limits",
    "rank_executor",
    "docs_site",
    "tutorials",
    "rendezvous_hosts",
    "mixed_precision",
    "memory_fit",
    "distributed_spatial_models",
    "accelerators_steps",
    "gradient_edits_norms",
    "pipeline_plan",
    "examples_launched",
    "pipeline_loops",
    "stage_search",
    "parameter_hooks",
    "parallel_spatial_models",
    "agreement",
    "pipeline_buffers",
    "whole_model",
    "autocast_collectives",
    "hybrid_parallel",
    "durability",
)


#: Files that import libraries of models, the longest first. They come last: a capture takes a third longer in a process
#: that has imported transformers, diffusers and timm (44 ms for 33, a small network), because Python updates all 2,400
#: classes below `nn.Module` when a tracer replaces a method of it.
LIBRARIES = (
    "models",
    "integrations",
    "verify_models",
    "autocast_models",
    "docs_pages",
    "microbatch",
    "matmul_experts",
    "notebooks",
    "stored_checkpoint",
    "checkpoint_on_ranks",
    "distributed_models",
    "capture_hugging_face",
    "sequence_buckets",
    "transform",
    "transform_checkpoints",
    "load",
    "examples_of_names",
    "monitored_loop",
)


#: Files of the quick part, about a minute on a quiet core (``-m quick``): a bit of everything that a version of Python
#: or of torch may change.
QUICK = (
    "regions_autograd_function",
    "export",
    "cluster",
    "redistributions",
    "environment",
    "indexing",
    "layout",
    "annotations",
    "notation",
    "packaging",
    "pipeline_plan",
    "rank_table",
    "schedules",
    "user_strategy",
    "torch_private",
    "spatial",
)


def prepare_torch() -> None:
    """Import torch in a process that runs tests."""
    import torch
    import torchvision_operators  # noqa: F401  before any import of torchvision

    torch.set_num_threads(1)
    # Ranks are forked (ranks.py). Autograd looks for devices once, before its first backward, and starts a thread for
    # each, after which no child can have a backward. A build with CUDA that has been in FakeTensorMode, as a capture
    # is, takes it that there is one.
    torch.ones(1, requires_grad=True).sum().backward()
    # pytest listens to every logger that does not propagate. To this one torch writes all that it compiles and exports,
    # as text with the stack of each call, where somebody listens.
    trace = logging.getLogger("torch.__trace")
    trace.propagate = True
    trace.handlers.clear()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # pytest-xdist would hand out the files of most tests first
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        prepare_torch()  # not in the process that hands tests out to others, which begin after it


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m quick`` the other files are not imported: that would take longer than the tests."""
    name = collection_path.stem
    if config.option.markexpr == "quick" and name.startswith("test_") and collection_path.suffix == ".py":
        return name.removeprefix("test_") not in QUICK or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files of `LONGEST` come first and those of `LIBRARIES` last; others, and the tests of each, stay in their order.
    Those of `QUICK` are marked. Tests of scale run where `-m` names them."""
    if "scale" not in config.getoption("markexpr"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("scale")])
        items[:] = [item for item in items if not item.get_closest_marker("scale")]
    quick = {f"test_{name}" for name in QUICK}
    for item in items:
        if item.path.stem in quick:
            item.add_marker("quick")
    names = (*LONGEST, None, *LIBRARIES)
    places = {f"test_{name}": place for place, name in enumerate(names)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


_FILES: list[Path] = []
#: Folders of tests whose models are captured twice, as a user's are. In all folders it would add 3 to 4 % of processor
#: time to tests of rules and planners (36.3 and 36.9 s for 35.2 and 35.4, measured on 237 of them).
CAPTURED_TWICE = ("capture", "docs", "examples", "integrations", "zoo")


def set_second_runs(path: Path) -> None:
    """Let captures be compared with a second run, or not, until the next file."""
    export = importlib.import_module("shardwright.capture.export")
    second_run = importlib.import_module("shardwright.capture.second_run")
    folder = path.relative_to(Path(__file__).parent).parts[0]
    export.check_again = second_run.check_again if folder in CAPTURED_TWICE else lambda first, captured: None


def set_followed_programs(path: Path) -> None:
    """Let a model follow the program of an earlier model of this file, or, in tests of captures, of none."""
    recapture = importlib.import_module("shardwright.capture.recapture")
    recapture.forget_programs()
    recapture.MOST_PROGRAMS = 0 if path.parts[len(Path(__file__).parent.parts)] == "capture" else 4


def give_memory_back() -> None:
    """Give free memory back to the system: a process of 1.9 GB takes four times as long to fork as one of 0.5 GB. After
    the tests of a ResNet-50, 620 of 1,120 MB are free."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the first test of a file, keep all that is alive: modules, caches, compiled code. No collection of garbage
    walks it again, and no search for optimizers. Without it a file costs many times as much at the end of a run as it
    does alone."""
    if item.path not in _FILES[-1:]:
        _FILES.append(item.path)
        set_second_runs(item.path)
        set_followed_programs(item.path)
        gc.collect()
        gc.freeze()
        give_memory_back()


def _loggers() -> list[logging.Logger]:
    named = logging.root.manager.loggerDict.values()
    return [logging.root, *(logger for logger in named if isinstance(logger, logging.Logger))]


_BEFORE: dict[Path, tuple[dict[str, str], str, dict[logging.Logger, int], torch.dtype]] = {}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    """After the last test of a file, the environment, the folder, the levels of logs and the default dtype are as they
    were before its first one: the code of a page may set them, and files share processes in any order."""
    import torch

    if item.path not in _BEFORE:
        levels = {logger: logger.level for logger in _loggers()}
        _BEFORE[item.path] = (dict(os.environ), os.getcwd(), levels, torch.get_default_dtype())
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            variables, folder, levels, dtype = _BEFORE.pop(item.path)
            for name in os.environ.keys() - variables.keys():
                del os.environ[name]
            os.environ.update(variables)
            os.chdir(folder)
            for logger in _loggers():
                ours = logger.name.startswith("shardwright")
                logger.setLevel(levels.get(logger, logging.NOTSET if ours else logger.level))
            torch.set_default_dtype(dtype)


_FIGURES: dict[str, tuple[float, float]] = {}


@pytest.fixture
def figures():
    """``figures(name, ours, theirs)``: bytes sent, ours against the original's; summed up at the end of the run."""

    def note(name: str, ours: float, theirs: float) -> None:
        before = _FIGURES.get(name, (0.0, 0.0))
        _FIGURES[name] = (before[0] + ours, before[1] + theirs)

    return note


def pytest_sessionfinish(session) -> None:
    worker = getattr(session.config, "workeroutput", None)
    if worker is not None:  # one of several processes that share the tests
        worker["figures"] = {name: list(pair) for name, pair in _FIGURES.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    for name, (ours, theirs) in getattr(node, "workeroutput", {}).get("figures", {}).items():
        before = _FIGURES.get(name, (0.0, 0.0))
        _FIGURES[name] = (before[0] + ours, before[1] + theirs)


def pytest_unconfigure() -> None:
    """Let the last collections of garbage, those of pytest and of the interpreter, walk nothing. Keep the summary the
    last lines: Triton, which torch.compile imports, lists at exit what pytest refers to."""
    gc.freeze()
    if "triton" in sys.modules:
        atexit.register(os.dup2, os.open(os.devnull, os.O_WRONLY), 2)


def pytest_terminal_summary(terminalreporter) -> None:
    if not _FIGURES:
        return
    terminalreporter.section("bytes a rank sends: ours / the original's")
    for name, (ours, theirs) in sorted(_FIGURES.items()):
        ratio = f"{ours / theirs:.2f}" if theirs else "-"
        terminalreporter.line(f"{ratio:>5}  {ours:>12,.0f} / {theirs:>12,.0f}  {name}")
