"""The commands that measure: ``shardwright calibrate``, ``rehearse`` and ``compare-trace``.

1. ``calibrate`` measures the cluster at hand and writes it as a file for planners.

    under a launcher (``torchrun -m shardwright calibrate``)     the ranks that were started are measured (`_measure`)
    otherwise                                                    processes are started on this machine through the
                                                                 launcher, and run the same command (`_start`)

2. ``rehearse`` plays one rank of a plan on this machine; ``compare-trace`` sets a profile beside its plan.

Example: ``shardwright calibrate --devices 2 --output ours.json`` starts 2 processes and writes the links and the
devices that were measured to "ours.json". ``shardwright rehearse plan.json --rank 7`` plays rank 7 of a plan.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PACKAGE_FOLDER, SettingError, ShardwrightError
from .command_line import (
    Nothing,
    Parser,
    add_import_option,
    add_json_option,
    add_quiet_option,
    failed,
    import_modules,
    positive,
    print_json,
    rank_number,
    refused,
    say,
)

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..process_runtime import Runtime

__all__ = [
    "add_calibrate_parser",
    "add_compare_trace_parser",
    "add_rehearse_parser",
    "calibrate",
    "compare",
    "rehearse",
]

# -- calibrate


def add_calibrate_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``calibrate`` to the commands."""
    parser = subparsers.add_parser(
        "calibrate",
        allow_abbrev=False,
        help="measure links, matmuls and memory, and write a cluster file",
        description="Measure what collectives, matmuls and memory give while all ranks are at work, and write it as a "
        "cluster file for planning. Under torchrun on the ranks that it started; otherwise on processes of "
        "this machine that are started for it. Exit code 0: written, 1: the ranks cannot be measured.",
        examples=(
            ("shardwright calibrate --devices 2 --output ours.json", "measure two devices of this machine"),
            (
                "torchrun --nnodes 4 --nproc_per_node 8 -m shardwright calibrate",
                "cluster.json of four hosts; on each of them",
            ),
        ),
    )
    parser.add_argument(
        "--devices",
        type=_several,
        metavar="N",
        help="how many processes, one a device (default: the accelerators here, or the cores)",
    )
    parser.add_argument(
        "--output",
        completes="file",
        type=Path,
        default=Path("cluster.json"),
        metavar="FILE",
        help="the file to write (default: cluster.json)",
    )
    parser.add_argument("--name", help="what the cluster is called (default: the host's name)")
    parser.add_argument("--rounds", type=_count, metavar="N", default=7, help="medians are of so many (default: 7)")
    parser.add_argument(
        "--log_dir",
        completes="directory",
        default="log_output",
        metavar="DIR",
        help="where the processes that are started write their logs (default: ./log_output)",
    )
    add_quiet_option(parser)
    parser.set_defaults(func=calibrate, parser=parser)


def calibrate(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code: 0, or 1 where the ranks cannot be measured."""
    import torch.distributed as dist  # noqa: PLC0415  torch takes seconds to import

    from ..process_runtime import init  # noqa: PLC0415  imports torch

    joined = dist.is_initialized()
    try:
        runtime = init()
        if runtime.processes:
            return _measure(runtime, arguments)
    except ShardwrightError as error:
        print(f"shardwright calibrate: error: {error}", file=sys.stderr)
        return 1
    finally:
        if dist.is_initialized() and not joined:
            dist.destroy_process_group()
    return _start(arguments)


def _measure(runtime: Runtime, arguments: argparse.Namespace) -> int:
    """Measure on one of the ranks that a launcher started."""
    from ..runtime.calibrate import calibrate as measure  # noqa: PLC0415  imports torch

    if arguments.devices not in (None, runtime.devices):
        raise SettingError(
            f"--devices={arguments.devices}, but the launcher started {runtime.devices} ranks",
            legal="no --devices under a launcher",
        )
    _by_rank_0(runtime, lambda: _check_writable(arguments.output))
    cluster = measure(runtime, arguments.name, arguments.rounds)

    def write() -> None:
        cluster.save(arguments.output)
        print(_summary(cluster, arguments.output), flush=True)

    _by_rank_0(runtime, write)
    return 0


def _by_rank_0(runtime: Runtime, act: Callable[[], None]) -> None:
    """Run a function on rank 0, while the others wait for it.

    Raises:
        SettingError: on every rank, where rank 0 raises it.
    """
    from ..runtime.distributed.rank_messages import error_as_json, error_of, from_first  # noqa: PLC0415  imports torch

    failed: dict[str, object] | None = None
    if runtime.rank == 0:
        try:
            act()
        except SettingError as error:
            failed = error_as_json(error)
    failed = from_first(failed)
    if failed is not None:
        raise error_of(failed)


def _start(arguments: argparse.Namespace) -> int:
    """Start processes on this machine and print the cluster that they wrote."""
    try:
        _check_writable(arguments.output)
    except SettingError as error:
        arguments.parser.error(error.message)
    import torch  # noqa: PLC0415  torch takes seconds to import

    from ..cluster import Cluster  # noqa: PLC0415  needed only where processes are started
    from ..launch import run  # noqa: PLC0415  needed only where processes are started

    devices = arguments.devices or max(2, torch.accelerator.device_count() or len(os.sched_getaffinity(0)))
    script_args = ["calibrate", f"--output={arguments.output.absolute()}", f"--rounds={arguments.rounds}"]
    if arguments.quiet:
        script_args.append("--quiet")
    if arguments.name is not None:
        script_args.append(f"--name={arguments.name}")
    code = run.run(
        argparse.Namespace(
            script=str(Path(PACKAGE_FOLDER) / "__main__.py"),
            script_args=script_args,
            devices=None,
            join=None,
            worker_num=devices,
            local_worker_num=None,
            master_addr=None,
            master_port=None,
            node_rank=None,
            log_dir=arguments.log_dir,
            cluster_time_out=None,
            threads=None,
            max_restarts=None,
            grace_period=None,
            parser=arguments.parser,
        )
    )
    if code == 0:
        print(_summary(Cluster.load(arguments.output), arguments.output))
    return code


def _summary(cluster: Cluster, path: Path) -> str:
    lines = [f"{cluster.name}: {cluster.devices} devices of {cluster.memory / 2**30:.1f} GiB"]
    lines += [
        f"  {level.name + ':':<10} {level.size} x {level.bandwidth / 1e9:.3g} GB/s, {level.latency * 1e6:.3g} us"
        for level in cluster.levels
    ]
    rates = ", ".join(f"{rate / 1e9:.3g} ({name})" for name, rate in cluster.peak.items())
    lines.append(f"  {'compute:':<10} {rates} Gflop/s, {cluster.overhead * 1e6:.3g} us an operator")
    lines.append(f"  {'memory:':<10} {cluster.memory_bandwidth / 1e9:.3g} GB/s")
    return "\n".join([*lines, f"written to {path}"])


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise SettingError(f"--output={path} is a folder")
    if not path.parent.is_dir():
        raise SettingError(f"--output={path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SettingError(f"--output={path} cannot be written to")


def _several(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 2")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


# -- rehearse, compare-trace


def add_rehearse_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``rehearse`` to the commands."""
    parser = subparsers.add_parser(
        "rehearse",
        allow_abbrev=False,
        help="play one rank of a plan on one device: seconds and memory beside the plan's",
        description="Play one rank of a plan on one device: real kernels on the rank's real shapes, and the memory "
        "that it holds. The other ranks are not there; what they would send takes no time. Prints the seconds of each "
        "operator, the communication that they do not hide and the step in time, both as the plan's schedule and cost "
        "model have the messages, and the peak of memory, each beside what the plan promises. "
        "The plan's file is enough. Exit code 0: played, 2: it cannot be played.",
        examples=(
            ("shardwright rehearse plan.json --rank 7", "one device plays rank 7 of the plan, be it for 1,024 devices"),
            ("shardwright rehearse plan.json --with-links --json", "rank 0, with the time of its messages, as JSON"),
        ),
    )
    parser.add_argument("--rank", type=rank_number, default=0, metavar="R", help="the rank (default: 0)")
    parser.add_argument("--device", metavar="DEVICE", help="such as cuda:1 or cpu (default: the accelerator, if any)")
    parser.add_argument(
        "--steps", type=positive, default=3, metavar="K", help="steps that are measured, after one (default: 3)"
    )
    parser.add_argument(
        "--with-links", action="store_true", help="sleep for each message as long as the plan's cost model says"
    )
    parser.add_argument(
        "--force", action="store_true", help="play also where the plan promises to need more memory than is free"
    )
    add_json_option(parser)
    add_import_option(parser)
    parser.add_argument("plan", completes="file", help="a file that shardwright plan or Plan.save wrote")
    add_quiet_option(parser)
    parser.set_defaults(func=rehearse, parser=parser)


def rehearse(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    from ..rehearsal.rehearse import rehearse as play  # noqa: PLC0415  imports torch

    try:
        import_modules(arguments.imports)
        made = play(
            arguments.plan,
            rank=arguments.rank,
            device=arguments.device,
            steps=arguments.steps,
            links=arguments.with_links,
            force=arguments.force,
        )
    except Nothing as error:
        return refused(arguments, error)
    except (ShardwrightError, OSError) as error:
        return failed("rehearse", error, 2)
    if arguments.json:
        print_json(made.to_dict())
    else:
        say(made.summary())
    return 0


def add_compare_trace_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add ``compare-trace`` to the commands."""
    parser = subparsers.add_parser(
        "compare-trace",
        allow_abbrev=False,
        help="a profile beside its plan: seconds of each operator and message",
        description="Set the seconds of a profile beside those that its plan promises: each operator, redistribution "
        "and bucket of gradients, forward and backward; equal layers share a row. The trace is a file of "
        "export_chrome_trace of torch.profiler, of one rank or of the local runtime. With kernels of a device in it, "
        "their seconds count, otherwise those of the host. Exit code 0: compared, 2: the plan or the trace cannot be "
        "read, or the trace is of another plan.",
        examples=(
            ("shardwright compare-trace plan.json trace.json", "each operator: measured, promised, and their ratio"),
            ("shardwright compare-trace plan.json trace.json --rank 0 --json", "as JSON, and the trace is of rank 0"),
        ),
    )
    parser.add_argument(
        "--rank", type=rank_number, metavar="R", help="the rank that the trace is to be of (default: as the trace says)"
    )
    add_json_option(parser)
    add_import_option(parser)
    parser.add_argument("plan", completes="file", help="a file that shardwright plan or Plan.save wrote")
    parser.add_argument("trace", completes="file", help="a Chrome trace of torch.profiler: .json or .json.gz")
    parser.set_defaults(func=compare, parser=parser)


def compare(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    from ..rehearsal.trace_comparison import compare_trace  # noqa: PLC0415  imports torch

    try:
        import_modules(arguments.imports)
        made = compare_trace(arguments.plan, arguments.trace, rank=arguments.rank)
    except Nothing as error:
        return refused(arguments, error)
    except (ShardwrightError, OSError) as error:
        return failed("compare-trace", error, 2)
    if arguments.json:
        print_json(made.to_dict())
    else:
        say(made.summary())
    return 0
