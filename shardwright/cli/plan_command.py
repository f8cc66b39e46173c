"""The commands about plans: ``plan``, ``plan diff``, ``explain``, ``simulate`` and ``report``.

1. ``shardwright plan``: plan a training script as it stands, or a function's model, for any number of devices. It
   needs no process group, no devices and no weights: the model is built on the meta device.
2. ``shardwright plan diff``: compare two plans.
3. ``shardwright explain``: the cost of a plan, and the reasons for an operator's strategy.
4. ``shardwright simulate``: a step of a plan over time, as text, as a trace and as a picture.
5. ``shardwright report``: a plan, or two side by side, as one HTML file.

For a script, ``plan`` takes the first call of its `AutoParallel` model, with its model, loss, settings and batch.

Example: ``shardwright plan train.py --devices 64 --pipeline 4:8:1f1b`` plans a pipeline of 4 stages and 8 micro-batches
in the order 1f1b, and writes it to ``plan.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SettingError, ShardwrightError
from ..launch.progress import keeper, showing
from .command_line import (
    OPTIONS_BEHIND,
    Nothing,
    Parser,
    add_import_option,
    add_json_option,
    add_quiet_option,
    arguments_of,
    failed,
    first_call,
    import_modules,
    positive,
    print_json,
    refused,
    take_options_behind,
    without_weights,
)

if TYPE_CHECKING:
    from ..parallel.auto_parallel import AutoParallel
    from ..pipeline.pipeline_plan import PipelinePlan
    from ..sharded_plan import Plan

__all__ = [
    "add_explain_parser",
    "add_plan_parser",
    "add_report_parser",
    "add_simulate_parser",
    "diff",
    "explain",
    "plan",
    "plan_call",
    "report",
    "simulate",
]


#: The exit codes of ``plan diff``.
EQUAL, DIFFERENT, FAILED = 0, 1, 2


def add_plan_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``plan`` to the commands."""
    parser = subparsers.add_parser(
        "plan",
        allow_abbrev=False,
        help="plan a model for any number of devices, or compare two plans",
        description="Plan a model without running it, print what a step takes, and write the plan. Exit code 0: "
        "planned, 1: it cannot be planned, 2: there is nothing to plan. With diff: compare two plans that "
        "were written. Exit code 0: they are equal, 1: they differ, 2: one of them cannot be read.",
        usage="%(prog)s [options] script.py [script arguments]\n"
        "       %(prog)s [options] module:function | file.py:function\n"
        "       %(prog)s diff a.json b.json",
        epilog=OPTIONS_BEHIND,
        examples=(
            (
                "shardwright plan train.py --devices 64 --cluster h100x8x8",
                "plan.json for 8 hosts of 8 H100; none is needed",
            ),
            (
                "shardwright plan diff plan.json edited.json",
                "operators and parameters that differ, and what a step takes",
            ),
        ),
    )
    _add_options(parser)
    parser.add_argument(
        "target",
        completes="file",
        help="a training script that calls an AutoParallel model; or a function without "
        "arguments that returns the keyword arguments of shardwright.plan as a dict, or "
        "(net, inputs, targets, loss_fn); or diff",
    )
    rest = parser.add_argument(
        "script_args",
        nargs=argparse.REMAINDER,
        metavar="...",
        completes="file",
        help="the script's arguments; with diff, the two plans",
    )
    rest.required = False  # otherwise argparse names it beside a missing target, though it may be empty
    parser.set_defaults(func=plan, parser=parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices",
        type=positive,
        metavar="N",
        help="how many devices (default: as the target says, else the cluster's)",
    )
    parser.add_argument(
        "--cluster",
        completes="file",
        metavar="FILE|PRESET",
        help='the devices and their links: a JSON file, or a preset such as "h100x8x128"',
    )
    parser.add_argument("--mode", metavar="MODE", help="the parallel mode (default: as the target says)")
    parser.add_argument(
        "--memory", metavar="SIZE", help='what a device may hold, such as "70GB", or "cluster" for its own'
    )
    parser.add_argument(
        "--comm-memory",
        metavar="SIZE",
        help='by how much messages under way may raise the peak of a device, such as "2GB" (default: two blocks)',
    )
    parser.add_argument(
        "--search-memory",
        metavar="SIZE",
        help='by how much host memory the search may grow, such as "2GB" (default: half of what is free)',
    )
    add_quiet_option(parser)
    parser.add_argument(
        "--hsdp", choices=("level1", "level2", "level3", "auto"), help="optimizer parallel, by its level"
    )
    add_json_option(parser)
    parser.add_argument(
        "--pipeline",
        type=pipeline_of,
        metavar="STAGES[:MICRO[:SCHEDULER]]",
        help="into how many stages and micro-batches, and the schedule, such as 4:8:1f1b; which module is "
        "in which stage, the target says (default: as the target says)",
    )
    parser.add_argument(
        "--strategies", metavar="PLAN", completes="file", help="a plan whose operators' strategies hold here too"
    )
    parser.add_argument(
        "-o",
        "--output",
        completes="file",
        type=Path,
        metavar="FILE",
        help="the plan to write (default: plan.json); given, Ctrl-C writes the search's best plan so far",
    )
    parser.add_argument(
        "--with-weights", action="store_true", help="build the model with its weights, for a script that looks at them"
    )
    add_import_option(parser)


def pipeline_of(text: str) -> dict[str, object]:
    """The arguments of `AutoParallel.pipeline` that ``STAGES[:MICRO[:SCHEDULER]]`` gives; a number may be "auto".

    Raises:
        argparse.ArgumentTypeError: something else.
    """
    parts = text.split(":", 2)
    counts = [part if part == "auto" else int(part) if part.isdecimal() and int(part) else None for part in parts[:2]]
    if None in counts or (len(parts) == 3 and not parts[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not STAGES[:MICRO[:SCHEDULER]], such as 4:8:1f1b")
    return dict(zip(("stages", "micro_batches", "scheduler"), (*counts, *parts[2:])))


def _piped(pipeline: object, asked: dict[str, object] | None) -> dict[str, object]:
    """The setting of a pipeline as a keyword argument. The command line's setting overrides the target's. Where
    neither gives the number of micro-batches, it is the number of stages."""
    if asked is None:
        return {} if pipeline is None else {"pipeline": pipeline}
    settings = {} if pipeline is None else dict(pipeline) if isinstance(pipeline, Mapping) else vars(pipeline)
    settings = {key: value for key, value in settings.items() if value is not None}
    merged = {"micro_batches": asked["stages"]} | settings | asked
    if "scheduler" in asked and asked["scheduler"] != settings.get("scheduler"):
        merged.pop("chunks", None)
    if merged["stages"] == "auto":
        merged.pop("stage_config", None)  # where the model is cut is searched too
    return {"pipeline": merged | {"stage_config": dict(merged.get("stage_config") or ())}}


def plan(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code. Errors of the script or function itself are raised as they are."""
    try:
        take_options_behind(arguments, _add_options)
        output = arguments.output or Path("plan.json")
        import_modules(arguments.imports)
        if arguments.target == "diff":
            return diff(arguments)
        _check_writable(output)
        with showing(False if arguments.quiet else None):
            made = planned(arguments)
        made.save(output)
    except KeyboardInterrupt:
        _keep_best(arguments.output)
        raise
    except Nothing as error:
        return refused(arguments, error)
    except ShardwrightError as error:
        return failed("plan", error, 1)
    except (NotImplementedError, RuntimeError) as error:  # torch's errors for a read of a tensor without values
        if "meta" in str(error) and not arguments.with_weights:
            print(
                "shardwright plan: the model was built without its weights; --with-weights builds it with them",
                file=sys.stderr,
            )
        raise
    from ..report.plan_figures import figures  # noqa: PLC0415  imports torch
    from ..report.tables import summary  # noqa: PLC0415  imports torch

    if arguments.json:
        print_json(figures(made) | {"output": str(output)})
        return 0
    summary(made, named=arguments.cluster is not None)
    print(f"written to {output}", flush=True)
    return 0


def _keep_best(output: Path | None) -> None:
    """Write the best plan of a search that Ctrl-C has stopped, where there is one and a file was named for it."""
    command = keeper()
    if command is None or command.best is None:
        return
    if output is None:
        command.if_stopped = "no plan is written; --output FILE keeps the best one so far"
        return
    print("shardwright plan: stopped; Ctrl-C again ends without the best plan so far", file=sys.stderr, flush=True)
    where = command.stopped
    try:
        made = command.best()
        if made is None:
            command.if_stopped = "no plan that fits in the memory was found; none is written"
            return
        made.save(output)
    except ShardwrightError as error:
        command.if_stopped = f"the best plan so far could not be written: {error}"
        return
    finally:
        command.stopped = where
    cost = f"{made.cost * 1e3:.4g} ms a step"
    gap = "no bound is proved" if made.bound is None else f"bound {made.bound * 1e3:.4g} ms, gap {made.gap:.2%}"
    command.if_stopped = f"the best plan so far is in {output}: {cost}, {gap}"


def planned(arguments: argparse.Namespace) -> Plan | PipelinePlan:
    """The plan of a script's first call, or of a function's model."""
    keywords = {
        key: value
        for key, value in (
            ("cluster", arguments.cluster),
            ("parallel_mode", arguments.mode),
            ("memory", arguments.memory),
            ("strategies", arguments.strategies),
            ("comm_memory", arguments.comm_memory),
            ("search_memory", arguments.search_memory),
        )
        if value
    }
    if arguments.hsdp:
        keywords["hsdp"] = {"optimizer_level": arguments.hsdp}
    devices = arguments.devices or _of_cluster(arguments.cluster)
    with contextlib.ExitStack() as building:
        if not arguments.with_weights:
            building.enter_context(without_weights())
        if os.path.isfile(arguments.target):

            def take(model: AutoParallel, args: tuple[object, ...], kwargs: dict[str, object]) -> Plan | PipelinePlan:
                building.close()  # the model is built; capture makes modules of its own
                piped = _piped(model.settings.pipeline, arguments.pipeline)
                return plan_call(model, args, kwargs, devices, **keywords | piped)

            return first_call(arguments.target, arguments.script_args, devices, take)
        found = arguments_of(arguments.target, arguments.script_args, "shardwright.plan")
    from ..planning import plan as make  # noqa: PLC0415  imports torch

    keywords |= _piped(found.get("pipeline"), arguments.pipeline)
    return make(**found | keywords | ({"devices": devices} if devices else {}))


def plan_call(
    model: AutoParallel,
    args: tuple[object, ...],
    kwargs: dict[str, object] | None = None,
    devices: int | None = None,
    **settings: object,
) -> Plan | PipelinePlan:
    """Plan one call of a wrapped model, with its settings.

    Args:
        model: the wrapped model.
        args, kwargs: the arguments of the call: the whole batch.
        devices: the number of devices; None: as many as the model would run on.
        settings: arguments of `shardwright.plan`, which override the wrapper's.

    Raises:
        ShardwrightError: a model that cannot be planned; the number of devices is not known.
    """
    from ..planning import plan as make  # noqa: PLC0415  imports torch
    from ..process_runtime import current  # noqa: PLC0415  imports torch

    loss = {} if model.loss_fn is None else {"loss_fn": model.loss_fn, "targets": args[-1]}
    keywords = model.settings.keywords() | loss | settings
    devices = devices or current().devices
    if devices is None:
        from ..planners.planning_problem import devices_of_call  # noqa: PLC0415  imports torch

        devices = devices_of_call(model.net, model.loss_fn, args, kwargs)
    if keywords["parallel_mode"] == "stand_alone":
        devices = 1
    return make(model.net, args[:-1] if loss else args, devices=devices, kwargs=kwargs or {}, **keywords)


def diff(arguments: argparse.Namespace) -> int:
    """Compare two saved plans, and return the exit code."""
    if {"-h", "--help"} & set(arguments.script_args):
        arguments.parser.parse_args(["--help"])
    if len(arguments.script_args) != 2:
        arguments.parser.error(f"diff takes two plans, but got {' '.join(arguments.script_args) or 'none'}")
    from ..planning import Plan  # noqa: PLC0415  imports torch; registers how plans are read
    from ..report.console_tables import console_of  # noqa: PLC0415  imports rich
    from ..report.plan_diff import difference  # noqa: PLC0415  imports torch
    from ..report.plan_figures import difference_figures  # noqa: PLC0415  imports torch

    try:
        before, after = map(Plan.load, arguments.script_args)
    except ShardwrightError as error:
        return failed("plan diff", error, FAILED)
    found = difference(before, after)
    if arguments.json:
        print_json(difference_figures(found))
    else:
        console = console_of(None)
        lines = found.fitted(console.width) if console.is_terminal else found.lines
        print("\n".join(lines), flush=True)
    return EQUAL if found.equal else DIFFERENT


def _of_cluster(cluster: str | None) -> int | None:
    """The number of devices of the cluster on the command line; None: no cluster is given."""
    if cluster is None:
        return None
    from ..cluster import Cluster  # noqa: PLC0415  needed only by some of the commands

    return Cluster.of(cluster).devices


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise Nothing(f"--output={path} is a folder")
    if not path.absolute().parent.is_dir():
        raise Nothing(f"--output={path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise Nothing(f"--output={path} cannot be written to")


# -- ``shardwright explain`` ---------------------------------------------------------------------------------------


def add_explain_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``explain`` to the commands."""
    parser = subparsers.add_parser(
        "explain",
        allow_abbrev=False,
        help="what a plan costs, and why an operator is split as it is",
        description="Of a plan that was written: how it is parallel, what a step takes and where, its lower bound. "
        "Of one of its modules: its operators. Of one of its operators: what it costs, its best alternatives and what "
        "a step would take with each, and what holds it where it is. Equal layers are one line. "
        "Exit code 0: explained, 2: the plan cannot be read, or has no such operator.",
        examples=(
            ("shardwright explain plan.json", "what a step takes, by layers, operators and messages"),
            ("shardwright explain plan.json up --alternatives 5", "why one operator is split so, beside 5 other ways"),
        ),
    )
    parser.add_argument("--alternatives", type=int, default=3, metavar="N", help="how many alternatives (default: 3)")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help='what a device may hold, such as "70GB", or "cluster" for its own (default: as the plan was searched for)',
    )
    add_json_option(parser)
    add_import_option(parser)
    parser.add_argument("plan", completes="file", help="a file that shardwright plan or Plan.save wrote")
    parser.add_argument(
        "operator", nargs="?", help="an operator or a module: its name, its path, or the end of the path (q_proj)"
    )
    parser.set_defaults(func=explain, parser=parser)


def explain(arguments: argparse.Namespace) -> int:
    """Explain a plan or one of its operators, and return the exit code."""
    from ..cluster import Cluster, memory_of  # noqa: PLC0415  needed only by some of the commands
    from ..operator_explanation import explained  # noqa: PLC0415  imports torch
    from ..planning import Plan  # noqa: PLC0415  imports torch; registers how plans are read
    from ..report.explanations import costs, tell  # noqa: PLC0415  imports torch
    from ..report.operator_names import OperatorNames  # noqa: PLC0415  imports torch
    from ..report.plan_figures import figures, module_figures, operator_figures  # noqa: PLC0415  imports torch

    if arguments.alternatives < 1:
        arguments.parser.error(f"--alternatives={arguments.alternatives} is below 1")
    try:
        import_modules(arguments.imports)
        plan = Plan.load(arguments.plan)
        memory = memory_of(arguments.memory, Cluster.of(plan.cluster, plan.devices))
        if arguments.json:
            found = () if arguments.operator is None else OperatorNames(plan).find(arguments.operator).operators
            if len(found) == 1:
                print_json(operator_figures(explained(plan, found[0], arguments.alternatives, memory)))
            else:
                print_json(module_figures(plan, found) if found else figures(plan))
        elif arguments.operator is None:
            costs(plan)
        else:
            tell(plan, arguments.operator, alternatives=arguments.alternatives, memory=memory)
    except Nothing as error:
        return refused(arguments, error)
    except ShardwrightError as error:
        return failed("explain", error, 2)
    return 0


# -- ``shardwright simulate`` --------------------------------------------------------------------------------------

#: The largest number of operators, over all actions, that a trace shows; more make the trace slow to open.
OPERATORS = 200_000


def add_simulate_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``simulate`` to the commands."""
    parser = subparsers.add_parser(
        "simulate",
        allow_abbrev=False,
        help="a step of a plan in time: bubbles, and memory on each group of ranks",
        description="Of a plan that was written: what a step takes, for how much of it devices wait, the most memory "
        "that each group of ranks holds, and the schedule of a pipeline. "
        "Exit code 0: simulated, 2: the plan cannot be read, or a file cannot be written.",
        examples=(
            ("shardwright simulate plan.json", "what a step takes, and what each group of ranks waits for"),
            (
                "shardwright simulate plan.json --trace step.json --picture step.svg",
                "the same for ui.perfetto.dev, and drawn",
            ),
        ),
    )
    parser.add_argument(
        "--trace", metavar="FILE", completes="file", help="write the step for ui.perfetto.dev or chrome://tracing"
    )
    parser.add_argument("--picture", metavar="FILE.svg", completes="file", help="write the step as a picture")
    add_json_option(parser)
    add_import_option(parser)
    parser.add_argument("plan", completes="file", help="a file that shardwright plan or Plan.save wrote")
    parser.set_defaults(func=simulate, parser=parser)


def simulate(arguments: argparse.Namespace) -> int:
    """Simulate a step of a plan, and return the exit code."""
    from ..cluster import Cluster  # noqa: PLC0415  needed only by some of the commands
    from ..json_files.json_values import write_text  # noqa: PLC0415  imports torch
    from ..pipeline.pipeline_plan import moments, timeline_of  # noqa: PLC0415  imports torch
    from ..planning import Plan  # noqa: PLC0415  imports torch; registers how plans are read
    from ..report.operator_names import OperatorNames  # noqa: PLC0415  imports torch
    from ..report.plan_figures import ranks_of_groups, step_figures  # noqa: PLC0415  imports torch
    from ..report.table_elements import beside_lines  # noqa: PLC0415  imports torch
    from ..report.timeline import headline, picture, simulated, trace  # noqa: PLC0415  imports torch

    if arguments.picture is not None and not arguments.picture.lower().endswith(".svg"):
        arguments.parser.error(f"--picture={arguments.picture} is no SVG file: its name ends with .svg")
    try:
        import_modules(arguments.imports)
        plan = Plan.load(arguments.plan)
        simulation = timeline_of(plan)
        plans = [plan] if isinstance(plan, Plan) else [stage.plan for stage in plan.stages]
        ranks, paths = ranks_of_groups(plan, simulation.schedule), OperatorNames(plan)
        if isinstance(plan, Plan):
            lines = list(beside_lines(plan))
            beside = {"messages beside computation": paths.in_time(plan.in_time)}
        else:
            lines = [f"with messages beside computation, as on a library: {headline(timeline_of(plan, beside=True))}"]
            within_stage = "messages beside computation, stage {}, one micro-batch and what is sent once a step"
            beside = {within_stage.format(s.number): paths.in_time(s.plan.stage_in_time_once) for s in plan.stages}
        if arguments.json:
            print_json(step_figures(plan))
        else:
            simulated(simulation, ranks, Cluster.of(plan.cluster, plan.devices).memory, beside=lines)
        names = [f"ranks {each[0]}-{each[-1]}" if len(each) > 1 else f"rank {each[0]}" for each in ranks]
        if arguments.trace is not None:
            operators = lambda of: [m._replace(operator=paths.path(m.operator)) for m in moments(of)]
            within = {stage: operators(each) for stage, each in enumerate(plans)}
            if sum(map(len, within.values())) * simulation.schedule.micro_batches > OPERATORS:
                within = {}
                print("the trace is without operators, which would be too many", file=sys.stderr)
            text = json.dumps(trace(simulation, names, operators=within, beside=beside if within else None))
            write_text(arguments.trace, text, SettingError, "the trace")
        if arguments.picture is not None:
            drawn = picture(simulation, names, beside=beside.get("messages beside computation"))
            write_text(arguments.picture, drawn, SettingError, "the picture")
    except Nothing as error:
        return refused(arguments, error)
    except (ShardwrightError, OSError) as error:
        return failed("simulate", error, 2)
    return 0


def add_report_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add ``report`` to the commands."""
    parser = subparsers.add_parser(
        "report",
        allow_abbrev=False,
        help="a plan as one HTML file, or two plans side by side",
        description="Write plans as one HTML file: layers, operators, slices on the device mesh, parameters, memory, "
        "collectives, the step in time, the certificate. It opens without a network. Needs Jinja2 (pip install "
        "shardwright[report]). Exit code 0: written, 2: a plan cannot be read, or the file cannot be written.",
        examples=(
            ("shardwright report plan.json -o plan.html", "one plan, as a page that opens without a network"),
            ("shardwright report plan.json edited.json -o both.html", "two plans side by side, and their differences"),
        ),
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE.html", help="the file to write", completes="file"
    )
    parser.add_argument(
        "--explain",
        type=int,
        metavar="N",
        help="price the alternatives of the N most expensive operators (default: 3; of a large plan "
        "those 3 while nothing else changes)",
    )
    add_import_option(parser)
    parser.add_argument(
        "plans", nargs="+", metavar="plan", help="one or two files of shardwright plan or Plan.save", completes="file"
    )
    add_quiet_option(parser)
    parser.set_defaults(func=report, parser=parser)


def report(arguments: argparse.Namespace) -> int:
    """Write the page, and return the exit code."""
    from ..planning import Plan  # noqa: PLC0415  imports torch; registers how plans are read
    from ..report.html_report import write  # noqa: PLC0415  imports torch

    if len(arguments.plans) > 2:
        arguments.parser.error(f"{len(arguments.plans)} plans: a report has one, or two side by side")
    if arguments.explain is not None and arguments.explain < 0:
        arguments.parser.error(f"--explain={arguments.explain} is below 0")
    try:
        import_modules(arguments.imports)
        plans = [Plan.load(path) for path in arguments.plans]
        write(plans, arguments.output, arguments.plans, arguments.explain)
    except Nothing as error:
        refused(arguments, error)
    except (ShardwrightError, OSError) as error:
        return failed("report", error, 2)
    print(f"written to {arguments.output}")
    return 0
