"""The agent: torchrun's engine, started for one run on one node.

The engine is ``torch.distributed.elastic``: its local agent starts the workers with torchrun's environment, each a
process group of its own, monitors them, and ends the others when one fails. `elastic_launch` wraps that agent and
hides it, so the agent is built here, as `elastic_launch` builds it, with five additions:

1. the process ids go to the `Watch`, which tells the first failure from those it causes;
2. after a failure the other workers get `GRACE` seconds to end, and after a stop signal the run's grace period; the
   engine gives 30 s however it is set;
3. nodes tell each other of failures, and the last barrier cannot outlast one;
4. after a failure the workers of all nodes start again, if restarts are left: with a new agent, watch and logs;
5. workers end where the launcher is killed: a `Guardian` knows those that run.

The overridden methods are those that ``SimpleElasticAgent`` leaves to its subclasses, and its loop and last barrier.

Example: of 8 workers the one of rank 3 ends with exit code 1. The other 7 get 10 s (`GRACE`) to end. With a restart
left, all 8 start again as attempt 1; otherwise the `RunOutcome` has the failure of worker 3.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException

from ..torch_private import worker_processes
from .console import Progress, Watch, WorkerExit, logger, remove_restarts
from .guardian import Guardian
from .rendezvous import NodeFailure, Nodes
from .run_settings import RunSettings

__all__ = ["RunOutcome", "launch"]

GRACE = 10  # seconds between asking a worker to end and killing it, where another has failed


@dataclass(frozen=True)
class RunOutcome:
    """The end of a run, or of one attempt at it, on this node.

    At most one of the first three fields is set; none means success.

    Args:
        failure: the exit of the first worker that failed here.
        elsewhere: the failure of another node.
        signal: the signal that ended the launcher.
        attempt: the number of restarts before this attempt.
    """

    failure: WorkerExit | None = None
    elsewhere: NodeFailure | None = None
    signal: signal.Signals | None = None
    attempt: int = 0

    @property
    def by_a_worker(self) -> bool:
        """True where a worker failed, here or elsewhere: another attempt may then succeed."""
        return self.failure is not None or (self.elsewhere is not None and self.elsewhere.kind == "worker")


class WorkerLogs(LogsSpecs):
    """The engine's description of output files: all output of a worker goes to its one file."""

    def __init__(self, settings: RunSettings, attempt: int) -> None:
        super().__init__(log_dir=settings.attempt_dir(attempt))
        self._settings, self._attempt = settings, attempt

    @property
    def root_log_dir(self) -> str:
        return self._settings.attempt_dir(self._attempt)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        outputs = {local: self._settings.worker_log(int(env["RANK"]), self._attempt) for local, env in envs.items()}
        for env in envs.values():
            # Tracebacks are in the logs. The error file of an outer launcher stays untouched.
            env["TORCHELASTIC_ERROR_FILE"] = ""
            env["TORCHELASTIC_MAX_RESTARTS"] = str(self._settings.max_restarts)
        # Standard error stays unset here: the worker's command sends it after standard output. The engine would open
        # the file a second time, and the two would write over each other.
        return LogsDest(
            stdouts=outputs, stderrs=dict.fromkeys(outputs, ""), error_files=dict.fromkeys(outputs, os.devnull)
        )


class Agent(LocalElasticAgent):
    """The engine's agent, with a watch on the workers and news from the other nodes."""

    def __init__(self, spec: WorkerSpec, settings: RunSettings, nodes: Nodes, watch: Watch, progress: Progress) -> None:
        super().__init__(spec, WorkerLogs(settings, nodes.attempt))
        self._remaining_restarts = 0  # `launch` restarts, not the engine
        self._settings = settings
        self._grace = GRACE
        self._nodes = nodes
        self._watch = watch
        self._progress = progress
        self.elsewhere: NodeFailure | None = None

    def _invoke_run(self, *arguments: str) -> RunResult:
        try:
            return super()._invoke_run(*arguments)
        except SignalException as stop:
            self._progress.ending(f"got {stop.sigval.name}")
            self._grace = self._settings.grace_period
            # At once: a save that workers make now needs all nodes.
            self._nodes.tell(128 + stop.sigval, f"got {stop.sigval.name}", kind="signal")
            raise

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        pids = super()._start_workers(worker_group)
        workers = worker_processes(self)
        workers.close = partial(self._end_workers, workers.close)  # the engine calls it from several places
        self._progress.started(
            {worker.global_rank: pids[worker.local_rank] for worker in worker_group.workers}, self._nodes.attempt
        )
        for worker in worker_group.workers:
            self._watch.follow(worker.global_rank, worker_processes(self).subprocess_handlers[worker.local_rank].proc)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY:
            self._progress.look()
            self.elsewhere = self._nodes.heard()
            if self.elsewhere is not None:
                self._progress.ending(f"node {self.elsewhere.node}: {self.elsewhere.text}")
                if self.elsewhere.kind == "signal":
                    self._grace = self._settings.grace_period
                    self._shutdown()
                return RunResult(state=WorkerState.FAILED)
        return result

    def _end_workers(
        self,
        close: Callable[[signal.Signals, int], None],
        death_sig: signal.Signals = signal.SIGTERM,
        timeout: int = 30,
    ) -> None:
        """End the workers that still run, within `_grace` seconds. The failure that is the reason for it is recorded
        first: it would not be the first failure otherwise."""
        try:
            self._watch.settle()
            close(death_sig, self._grace)
        except SignalException:  # a second Ctrl-C: end without a grace period
            self._watch.kill()
            raise

    def _exit_barrier(self) -> None:
        self.elsewhere = self._nodes.leave(finished=True)


def launch(
    settings: RunSettings, progress: Progress, guardian: Guardian, stop_signals: Sequence[signal.Signals]
) -> RunOutcome:
    """Run the workers of this node until all have finished, or one has failed and no restart is left.

    No worker is left when it returns or raises.

    Args:
        settings: the run.
        progress: told of every change.
        guardian: told of the workers that run.
        stop_signals: the signals that end the run and its workers.

    Returns:
        The outcome of the last attempt.

    Raises:
        LaunchError, SettingError: the nodes cannot meet.
    """
    for module in ("agent.server.api", "agent.server.local_elastic_agent", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(logging.INFO)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(stop.name for stop in stop_signals)
    nodes = Nodes(settings, progress.say)
    remove_restarts(settings)
    before = {stop: signal.getsignal(stop) for stop in stop_signals}
    came: list[signal.Signals] = []

    def note() -> None:
        """Record stop signals from now on: the short work that follows is not interrupted, but a signal counts."""
        for stop in stop_signals:
            signal.signal(stop, lambda number, frame: came.append(signal.Signals(number)))

    while True:
        outcome = _attempt(settings, nodes, progress, guardian, note)
        if came and outcome.by_a_worker:
            outcome = RunOutcome(signal=came[0], attempt=nodes.attempt)
        if not outcome.by_a_worker or nodes.attempt == settings.max_restarts:
            break
        if outcome.failure is not None:
            nodes.tell(outcome.failure.code, _reason(outcome.failure), kind="worker")
        nodes.attempt += 1
        log_dir = settings.attempt_dir(nodes.attempt)
        os.makedirs(log_dir, exist_ok=True)
        progress.say(f"restart {nodes.attempt} of {settings.max_restarts}: all workers start again, logs in {log_dir}")
        for stop, handler in before.items():
            signal.signal(stop, handler)
    if outcome.failure is not None:
        nodes.tell(outcome.failure.code, _reason(outcome.failure), kind="worker")
    elif outcome.signal is not None:
        nodes.tell(128 + outcome.signal, f"got {outcome.signal.name}", kind="signal")
    if outcome.failure or outcome.signal or outcome.elsewhere:
        nodes.leave(finished=False)
    return outcome


def _attempt(
    settings: RunSettings, nodes: Nodes, progress: Progress, guardian: Guardian, note: Callable[[], None]
) -> RunOutcome:
    """Start the workers of this node once, and wait for their end.

    Args:
        note: called at the end; from then on signals are recorded and interrupt nothing.
    """

    def exited(exit: WorkerExit) -> None:
        logger.info("worker %d ended: %s", exit.rank, exit.cause)
        progress.exited(exit)

    watch = Watch(exited, guardian.watched)
    # The engine tells the workers `max_restarts` less the restarts left (0): the number of this attempt.
    spec = WorkerSpec(
        role="default_role",
        local_world_size=settings.local_worker_num,
        rdzv_handler=nodes,
        max_restarts=nodes.attempt,
        entrypoint="/bin/sh",
        args=_command(settings),
    )
    agent = Agent(spec, settings, nodes, watch, progress)
    stopped = None
    try:
        agent.run()
    except SignalException as stop:
        stopped = stop.sigval
    finally:
        note()
        watch.end()
    failure = watch.first_failure if stopped is None and agent.elsewhere is None else None
    return RunOutcome(failure, agent.elsewhere, stopped, nodes.attempt)


def _reason(failure: WorkerExit) -> str:
    return f"worker {failure.rank} failed ({failure.cause})"


def _command(settings: RunSettings) -> tuple[str, ...]:
    """The arguments of the shell that becomes a worker.

    The shell is there for ``2>&1`` alone: one file, one position in it, lines in the order they were written. It is
    replaced by Python at once, so process ids and signals are the worker's own.
    """
    command = ("-c", 'exec "$@" 2>&1', "sh", sys.executable, "-u", settings.script, *settings.script_args)
    # The engine replaces ${local_rank} and the like in arguments; a script's arguments are its own.
    return tuple(part.replace("$", "$$") for part in command)
