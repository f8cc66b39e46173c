"""``shardwright calibrate``: measure the cluster at hand and write it as a file for planners.

1. Under a launcher (``torchrun -m shardwright calibrate``) the ranks that were started are measured (`_measure`).
2. Otherwise processes are started on this machine through the launcher, and run the same command (`_start`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PACKAGE_FOLDER, SettingError, ShardwrightError
from .command_line import add_quiet_option

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..process import Runtime

__all__ = ["add_calibrate_parser", "calibrate"]


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

    from ..process import init  # noqa: PLC0415  imports torch

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
    from ..runtime.distributed.calibrate import calibrate as measure  # noqa: PLC0415  imports torch

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
    from ..runtime.distributed.coordination import error_of, error_words, from_first  # noqa: PLC0415  imports torch

    failed: dict[str, object] | None = None
    if runtime.rank == 0:
        try:
            act()
        except SettingError as error:
            failed = error_words(error)
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
