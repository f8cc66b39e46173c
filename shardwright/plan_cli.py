"""``shardwright plan``: plan a training script as it stands, or a function's model, for any number of devices; and
``shardwright plan diff``: compare two plans.

No process group, no devices, no weights: the model is built on the meta device. Of a script the first call of its
`AutoParallel` model is planned, with its model, loss, settings and batch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.errors import ShardwrightError
from shardwright.scripts import Nothing, arguments_of, first_call, import_modules, positive, without_weights

if TYPE_CHECKING:
    from shardwright.parallel import AutoParallel
    from shardwright.plan import PipelinePlan, Plan

__all__ = ["add_parser", "diff", "plan", "plan_call"]

#: The exit codes of ``plan diff``.
EQUAL, DIFFERENT, FAILED = 0, 1, 2


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``plan`` to the commands."""
    parser = subparsers.add_parser(
        "plan", allow_abbrev=False, help="plan a model for any number of devices, or compare two plans",
        description="Plan a model without running it, print what a step takes, and write the plan. Exit code 0: "
                    "planned, 1: it cannot be planned, 2: there is nothing to plan. With diff: compare two plans that "
                    "were written. Exit code 0: they are equal, 1: they differ, 2: one of them cannot be read.",
        usage="%(prog)s [options] script.py [script arguments]\n"
              "       %(prog)s [options] module:function | file.py:function\n"
              "       %(prog)s diff a.json b.json",
        epilog="Options may stand behind the target too; what is none of them, and all that stands behind --, is the "
               "script's.")
    _add_options(parser)
    parser.add_argument("target", help="a training script that calls an AutoParallel model; or a function without "
                                       "arguments that returns the keyword arguments of shardwright.plan as a dict, or "
                                       "(net, inputs, targets, loss_fn); or diff")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...",
                        help="the script's arguments; with diff, the two plans")
    parser.set_defaults(func=plan, parser=parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=positive, metavar="N",
                        help="how many devices (default: as the target says, else the cluster's)")
    parser.add_argument("--cluster", metavar="FILE|PRESET",
                        help='the devices and their links: a JSON file, or a preset such as "h100x8x128"')
    parser.add_argument("--mode", metavar="MODE", help="the parallel mode (default: as the target says)")
    parser.add_argument("--memory", metavar="SIZE",
                        help='what a device may hold, such as "70GB", or "cluster" for its own')
    parser.add_argument("--search-memory", metavar="SIZE",
                        help='by how much host memory the search may grow, such as "2GB" (default: half of what is free)')
    parser.add_argument("--quiet", action="store_true", help="say nothing while it searches")
    parser.add_argument("--hsdp", choices=("level1", "level2", "level3"), help="optimizer parallel, by its level")
    parser.add_argument("--pipeline", type=pipeline_of, metavar="STAGES[:MICRO[:SCHEDULER]]",
                        help="into how many stages and micro-batches, and the schedule, such as 4:8:1f1b; which module is "
                             "in which stage, the target says (default: as the target says)")
    parser.add_argument("--strategies", metavar="PLAN", help="a plan whose operators' strategies hold here too")
    parser.add_argument("--output", type=Path, default=Path("plan.json"), metavar="FILE",
                        help="the plan to write (default: plan.json)")
    parser.add_argument("--with-weights", action="store_true",
                        help="build the model with its weights, for a script that looks at them")
    parser.add_argument("--import", action="append", default=[], dest="imports", metavar="MODULE",
                        help="import a module first, which registers operators of yours (may be repeated)")


def pipeline_of(text: str) -> dict[str, Any]:
    """The arguments of `AutoParallel.pipeline` that ``STAGES[:MICRO[:SCHEDULER]]`` gives; a number may be "auto".

    Raises:
        argparse.ArgumentTypeError: something else.
    """
    parts = text.split(":", 2)
    counts = [part if part == "auto" else int(part) if part.isdecimal() and int(part) else None for part in parts[:2]]
    if None in counts or len(parts) == 3 and not parts[2]:
        raise argparse.ArgumentTypeError(f"{text!r} is not STAGES[:MICRO[:SCHEDULER]], such as 4:8:1f1b")
    return dict(zip(("stages", "micro_batches", "scheduler"), (*counts, *parts[2:])))


def _piped(said: Any, asked: dict[str, Any] | None) -> dict[str, Any]:
    """The setting of a pipeline as a keyword argument: what a target says, and over it what was asked for. Where nobody
    says how many micro-batches, there are as many as stages."""
    if asked is None:
        return {} if said is None else {"pipeline": said}
    held = {} if said is None else dict(said) if isinstance(said, Mapping) else vars(said)
    held = {key: value for key, value in held.items() if value is not None}
    merged = {"micro_batches": asked["stages"]} | held | asked
    if "scheduler" in asked and asked["scheduler"] != held.get("scheduler"):
        merged.pop("chunks", None)
    if merged["stages"] == "auto":
        merged.pop("stage_config", None)  # where the model is cut is searched too
    return {"pipeline": merged | {"stage_config": dict(merged.get("stage_config") or ())}}


def _with_options_behind(arguments: argparse.Namespace) -> None:
    """Options that stand behind the target are taken from among the script's arguments."""
    given = arguments.script_args
    end = given.index("--") if "--" in given else len(given)
    parser = type(arguments.parser)(prog=arguments.parser.prog, add_help=False, allow_abbrev=False)
    _add_options(parser)
    _, rest = parser.parse_known_args(given[:end], arguments)
    arguments.script_args = rest + given[end + 1:]


def plan(arguments: argparse.Namespace) -> int:
    """Do what the parsed arguments ask for and return the exit code.

    What the script or function itself raises goes through.
    """
    _with_options_behind(arguments)
    try:
        import_modules(arguments.imports)
        if arguments.target == "diff":
            return diff(arguments)
        _check_writable(arguments.output)
        made = planned(arguments)
        made.save(arguments.output)
    except Nothing as error:
        arguments.parser.error(str(error))
    except ShardwrightError as error:
        print(f"shardwright plan: error: {error}", file=sys.stderr)
        return 1
    except (NotImplementedError, RuntimeError) as error:  # as torch refuses what a tensor without values cannot give
        if "meta" in str(error) and not arguments.with_weights:
            print("shardwright plan: the model was built without its weights; --with-weights builds it with them",
                  file=sys.stderr)
        raise
    from shardwright.report.planned import summary

    summary(made)
    print(f"written to {arguments.output}", flush=True)
    return 0


def planned(arguments: argparse.Namespace) -> Plan | PipelinePlan:
    """The plan of a script's first call, or of what a function returns."""
    given = {key: value for key, value in (("cluster", arguments.cluster), ("parallel_mode", arguments.mode),
                                           ("memory", arguments.memory), ("strategies", arguments.strategies),
                                           ("search_memory", arguments.search_memory)) if value}
    if arguments.quiet:
        given["search_progress"] = False
    if arguments.hsdp:
        given["hsdp"] = {"optimizer_level": arguments.hsdp}
    devices = arguments.devices or _of_cluster(arguments.cluster)
    with contextlib.ExitStack() as building:
        if not arguments.with_weights:
            building.enter_context(without_weights())
        if os.path.isfile(arguments.target):
            def take(model: AutoParallel, args: tuple, kwargs: dict[str, Any]) -> Plan | PipelinePlan:
                building.close()  # the model is there: capture works on modules of its own
                piped = _piped(model.plan_settings()["pipeline"], arguments.pipeline)
                return plan_call(model, args, kwargs, devices, **given | piped)
            return first_call(arguments.target, arguments.script_args, devices, take)
        found = arguments_of(arguments.target, arguments.script_args, "shardwright.plan")
    from shardwright.plan import plan as make

    given |= _piped(found.get("pipeline"), arguments.pipeline)
    return make(**found | given | ({"devices": devices} if devices else {}))


def plan_call(model: AutoParallel, args: tuple, kwargs: dict[str, Any] | None = None, devices: int | None = None,
              **settings: Any) -> Plan | PipelinePlan:
    """Plan one call of a wrapped model, with its settings.

    Args:
        args, kwargs: what it is called with: the whole batch.
        devices: None: as many as it would run on.
        settings: of `shardwright.plan`, in the place of the wrapper's.

    Raises:
        ShardwrightError: what cannot be planned; nothing says how many devices.
    """
    from shardwright.plan import plan as make
    from shardwright.runtime.init import current

    loss = {} if model.loss_fn is None else {"loss_fn": model.loss_fn, "targets": args[-1]}
    given = model.plan_settings() | loss | settings
    devices = devices or current().devices
    if devices is None:
        from shardwright.settling import implied_devices
        devices = implied_devices(model.net)
    if given["parallel_mode"] == "stand_alone":
        devices = 1
    return make(model.net, args[:-1] if loss else args, devices=devices, kwargs=kwargs or {}, **given)


def diff(arguments: argparse.Namespace) -> int:
    """Compare two plans that were written, and return the exit code."""
    if len(arguments.script_args) != 2:
        arguments.parser.error(f"diff takes two plans, but got {' '.join(arguments.script_args) or 'none'}")
    from shardwright.plan import Plan
    from shardwright.report.difference import difference

    try:
        before, after = map(Plan.load, arguments.script_args)
    except ShardwrightError as error:
        print(f"shardwright plan diff: error: {error}", file=sys.stderr)
        return FAILED
    found = difference(before, after)
    print("\n".join(found.lines), flush=True)
    return EQUAL if found.equal else DIFFERENT


def _of_cluster(cluster: str | None) -> int | None:
    """How many devices a cluster that was asked for has."""
    if cluster is None:
        return None
    from shardwright.cluster import Cluster

    return Cluster.of(cluster).devices


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise Nothing(f"--output={path} is a folder")
    if not path.absolute().parent.is_dir():
        raise Nothing(f"--output={path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise Nothing(f"--output={path} cannot be written to")
