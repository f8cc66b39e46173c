"""``shardwright run``: start the workers of a run, or run a script in this process on several devices.

    --worker_num=4                 4 worker processes (`run_workers`)
    --worker_num=4 --join=False    the same, in the background (`run_behind`)
    --devices=4                    no workers: the script in this process, on 4 devices (`run_in_process`)

The workers are started by `agent.launch`.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import subprocess
import sys
from types import FrameType
from typing import Any

from ..errors import SettingError, ShardwrightError
from .console import Progress, coordinator_log, last_lines, refusal, spelt
from .environment import TOKEN, token_of
from .guardian import Guardian
from .run_settings import WORKER_OPTIONS, RunSettings, check_port, check_script

__all__ = ["add_run_parser", "run"]

# Sent by Ctrl-C, by kill and schedulers, by a closed terminal, by Ctrl-\.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def add_run_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``run`` to the commands."""
    parser = subparsers.add_parser(
        "run",
        allow_abbrev=False,
        help="run a script on several workers, or on several devices in one process",
        description="Run a script on several workers, one process each, or with --devices alone in this one process. "
        "Exit code 0: every worker finished, 1: the nodes did not meet, 2: a mistake in the arguments; otherwise that "
        "of the worker that failed first, 128 + n where signal n ended it.",
        usage="%(prog)s [options] script.py [script arguments]",
        examples=(
            (
                "shardwright run --worker_num=8 train.py --epochs 3",
                "eight processes of this host; --epochs is the script's",
            ),
            ("shardwright run --devices=8 train.py", "the same devices, all in this one process"),
        ),
    )

    def option(name: str, help: str, **keywords: Any) -> None:
        parser.add_argument(f"--{name}", help=help, **keywords)

    option("devices", "run the script in this process, on N devices; no workers", type=_positive, metavar="N")
    option("worker_num", "workers on all nodes together (default: local_worker_num)", type=_positive, metavar="N")
    option("local_worker_num", "workers on this node (default: worker_num)", type=_positive, metavar="N")
    option("master_addr", "address of node 0 (default: 127.0.0.1)", metavar="ADDRESS")
    option("master_port", "rendezvous port on node 0; 0, the default, is any free one", type=_port, metavar="PORT")
    option("node_rank", "which node this is (default: 0)", type=_count, metavar="N")
    option(
        "log_dir",
        completes="directory",
        help="where worker_N.log and scheduler.log go (default: ./log_output)",
        metavar="DIR",
    )
    option("join", "False leaves the run in the background (default: True)", type=_flag, metavar="True|False")
    option("cluster_time_out", "how long to wait for all nodes (default: 600)", type=_positive, metavar="SECONDS")
    option("threads", "OMP_NUM_THREADS of each worker (default: as set, or 1)", type=_positive, metavar="N")
    option(
        "max_restarts", "start all workers again after a failure, up to N times (default: 0)", type=_count, metavar="N"
    )
    option(
        "grace_period",
        "how long workers may take to save and end after SIGTERM (default: 30)",
        type=_count,
        metavar="SECONDS",
    )
    parser.add_argument("script", completes="file", help="the Python file to run")
    # Everything after the script belongs to the script, options as well.
    rest = parser.add_argument(
        "script_args", nargs=argparse.REMAINDER, metavar="...", completes="file", help="its arguments, untouched"
    )
    rest.required = False  # otherwise argparse names it beside a missing script, though it may be empty
    parser.set_defaults(func=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Execute the parsed arguments and return the exit code.

    The exit code is 0 if every worker finished; that of the first worker that failed, ``128 + n`` if signal ``n``
    ended the worker or the launcher; 1 if the nodes did not meet; 2 for a mistake in the arguments.
    """
    settings: RunSettings | None = None
    try:
        if arguments.devices is not None:
            worker_options = [name for name in (*WORKER_OPTIONS, "join") if getattr(arguments, name) is not None]
            if worker_options:
                raise SettingError(
                    f"--devices runs the script in this one process; --{worker_options[0]} is for workers"
                )
            check_script(arguments.script)
        else:
            settings = RunSettings.of(arguments, token_of(os.environ))
            if settings.node_rank == 0:
                check_port(settings.master_addr, settings.master_port, settings.nodes > 1)
            _make_directory(settings.log_dir)
    except SettingError as error:
        arguments.parser.error(error.message if error.legal is None else f"{error.message}; legal: {error.legal}")
    if arguments.devices is not None:
        return run_in_process(arguments.devices, arguments.script, arguments.script_args)
    assert settings is not None
    if arguments.join is False:
        return run_behind(settings)
    return run_workers(settings)


def run_in_process(devices: int, script: str, script_args: list[str]) -> int:
    """Run the script in this process as ``python script.py`` does, with ``SHARDWRIGHT_DEVICES`` set.

    Exceptions of the script, SystemExit included, pass through: traceback and exit code are the script's own.
    """
    os.environ["SHARDWRIGHT_DEVICES"] = str(devices)
    sys.argv = [script, *script_args]
    # Python puts the script's folder first; at present it is the folder of this command.
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")
    return 0


def run_behind(settings: RunSettings) -> int:
    """Start the same command in the background, in a session of its own, and return at once."""
    with open(settings.scheduler_log, "ab") as log:
        command = [sys.executable, "-m", "shardwright", "run", "--join=True", *settings.command_line()]
        launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    print(
        f"the launcher runs in the background with pid {launcher.pid} and writes to {settings.scheduler_log}, "
        f"worker {settings.ranks[0]} to {settings.worker_log(settings.ranks[0])}; kill {launcher.pid} ends them all",
        flush=True,
    )
    return 0


def run_workers(settings: RunSettings) -> int:
    """Run the workers of this node to their end and return the run's exit code."""
    stop_signals = [stop for stop in STOP_SIGNALS if signal.getsignal(stop) is not signal.SIG_IGN]  # nohup ignores some
    before = {stop: signal.signal(stop, _stop) for stop in stop_signals}
    token = os.environ.get(TOKEN)
    os.environ[TOKEN] = settings.token  # workers inherit it
    if settings.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    progress = Progress(settings, sys.stdout)
    try:
        with Guardian(settings.grace_period) as guardian, coordinator_log(settings.scheduler_log), progress:
            from .agent import launch  # noqa: PLC0415  torch takes seconds to import

            outcome = launch(settings, progress, guardian, stop_signals)
    except _Stopped as stop:
        print(f"ended by {stop.signal.name} before any worker was started", file=sys.stderr)
        return 128 + stop.signal
    except ShardwrightError as error:
        print(f"shardwright run: error: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, SettingError) else 1
    except OSError as error:  # a log that cannot be opened; anything else is a fault of the launcher, with a traceback
        if os.path.dirname(str(error.filename)) != settings.log_dir:
            raise
        print(f"shardwright run: error: {error.filename} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        del os.environ[TOKEN]
        if token is not None:
            os.environ[TOKEN] = token

    if outcome.failure is not None:
        log = settings.worker_log(outcome.failure.rank, outcome.attempt)
        lines = last_lines(log) or ["(nothing was written)"]
        folder = settings.attempt_dir(outcome.attempt)
        full = refusal(folder)
        print(
            f"worker {outcome.failure.rank} failed ({outcome.failure.cause}), last lines of {log}:",
            *lines,
            *([f"{folder} takes no more bytes ({full}): lines may be missing from the logs"] if full else []),
            f"all logs are in {folder}",
            sep="\n",
            file=sys.stderr,
        )
        return outcome.failure.code
    if outcome.elsewhere is not None:
        print(
            f"the run failed on node {outcome.elsewhere.node}: {spelt(outcome.elsewhere.text)}; logs of this node are "
            f"in {settings.log_dir}",
            file=sys.stderr,
        )
        return outcome.elsewhere.code
    if outcome.signal is not None:
        where = f" in {progress.work}" if progress.work else ""
        print(
            f"ended by {outcome.signal.name}{where}, and the workers with it; logs are in {settings.log_dir}",
            file=sys.stderr,
        )
        return 128 + outcome.signal
    progress.say(
        f"all {settings.worker_num} workers finished in {progress.seconds:.1f} s, logs in "
        f"{settings.attempt_dir(outcome.attempt)}"
    )
    return 0


class _Stopped(BaseException):
    """A stop signal before the engine has taken over the signals. Not an Exception: an import would swallow it."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped(number)


def _make_directory(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise SettingError(f"--log_dir={path} cannot be made: {error.strerror}") from None
    reason = refusal(path)
    if reason is not None:
        raise SettingError(f"--log_dir={path} cannot be written to: {reason}")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() == "true"
