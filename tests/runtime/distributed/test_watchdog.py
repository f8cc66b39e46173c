"""Runs that go wrong: ranks that call something else than their peers, that do not come, that die, that are told to
end.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_log import rank_of_eight
from hypothesis import given, strategies as st
from ranks import join_group, let_others_finish, load_what_a_capture_needs, meeting_socket
from small_networks import D, draw, labels
from torch import nn

import shardwright as sw
from shardwright.process_runtime import Runtime, torch_timeout
from shardwright.runtime.distributed import watchdog
from shardwright.runtime.distributed.agreement import Steps
from shardwright.runtime.distributed.rank_positions import PassedPlaces, Seen, WaitPoint, position, waiting
from shardwright.runtime.distributed.watchdog import peers

WORLD = 4
PATIENCE = 4.0  # seconds that a rank waits for another, once it has become impatient
DEADLINE = 300.0  # seconds in which all ranks of a scenario must have ended
AT_ONCE = 6  # scenarios

#: Each runs on every rank, all of them at once in processes of their own, and is to end them all.
SCENARIOS: dict[str, Callable[[int], Any]] = {}


def scenario(function: Callable[[int], Any]) -> Callable[[int], Any]:
    SCENARIOS[function.__name__] = function
    return function


@dataclass
class Ended:
    """The ends of the ranks of a scenario: exit codes (None: one had to be killed), and what each wrote."""

    codes: list[int | None]
    wrote: list[str]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(sw.shard(nn.Linear(8, 8, dtype=D), ((2, 2), (1, 2), (1,))))


class Trained:
    """A network on four ranks, its sums in both directions, and a step of it."""

    def __init__(self) -> None:
        sw.init(timeout=60)
        self.net = network()
        self.model = sw.AutoParallel(self.net, nn.CrossEntropyLoss()).dataset_strategy("full_batch")

    def __call__(self, rows: int = 16) -> torch.Tensor:
        return self.model(draw(rows, 8), labels(rows))

    def steps(self, count: int, rows: int = 16) -> None:
        for _ in range(count):
            self(rows).backward()


class Pipelined(Trained):
    """Two layers in two stages on four ranks; the cuts of each layer, if they are given."""

    def __init__(self, *cuts: tuple[tuple[int, ...], ...]) -> None:
        sw.init(timeout=60)
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8, dtype=D), nn.Linear(8, 8, dtype=D))
        for layer, cut in zip(self.net, cuts):
            sw.shard(layer, cut)
        sw.set_stage(self.net[0], 0), sw.set_stage(self.net[1], 1)
        self.model = sw.AutoParallel(self.net, nn.CrossEntropyLoss()).dataset_strategy("full_batch")
        self.model.pipeline(stages=2, micro_batches=2)


def grow_impatient() -> None:
    """From now on the others are looked for sooner: what takes long on a busy machine, planning, is behind."""
    dist.barrier()
    peers().patience, peers().look = PATIENCE, PATIENCE / 8


def tells(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- ranks that call something else ------------------------------------------------------------------------------------


@scenario
def another_shape(rank: int) -> None:
    model = Trained()
    model.steps(2), model.steps(1, rows=32), model.steps(2)
    grow_impatient()
    model.steps(1, rows=32 if rank == 2 else 16)


@scenario
def a_new_shape(rank: int) -> None:
    model = Trained()
    model.steps(2)
    grow_impatient()
    model.steps(1, rows=8 if rank == 2 else 16)


@scenario
def another_model(rank: int) -> None:
    one, other = Trained(), Trained()
    one.steps(1), other.steps(1)
    grow_impatient()
    (one if rank == 2 else other).steps(1)


@scenario
def once_more(rank: int) -> None:
    model = Trained()
    model.steps(1)
    grow_impatient()
    model.steps(2 if rank == 2 else 1)
    with torch.no_grad():
        model()


@scenario
def without_gradients(rank: int) -> None:
    model = Trained()
    model.steps(2)
    grow_impatient()
    with torch.set_grad_enabled(rank != 2):
        model()


@scenario
def an_input_without_values(rank: int) -> None:
    """Rank 2 feeds a meta tensor after all have fed some, which is an error of its own on all of them."""
    model = Trained()
    model.steps(1)
    meta = torch.empty(16, 8, dtype=D, device="meta")
    with pytest.raises(sw.SettingError, match="input 0 is on the meta device"):
        model.model(meta, labels(16))
    model.steps(1)
    grow_impatient()
    model.model(meta if rank == 2 else draw(16, 8), labels(16)).backward()


@scenario
def a_second_forward(rank: int) -> None:
    """Rank 2 makes one more forward than the others before the backward. None would find it out by its patience."""
    model = Trained()
    model.steps(2)
    dist.barrier()
    peers().patience = 10 * DEADLINE
    loss = model()
    if rank == 2:
        model()
    loss.backward()


@scenario
def a_second_step_of_a_pipeline(rank: int) -> None:
    """A pipeline runs the backward with the forward, and the others go on to their next call."""
    model = Pipelined()
    model.steps(2)
    dist.barrier()
    peers().patience = 10 * DEADLINE
    if rank == 2:
        model()
        model()
    model.steps(2)


SECOND = {
    "a_second_forward": r"call 4 of rank 2 is program 1 .*, call 2 since the last backward, without a backward of call "
    r"3, in which ranks? 0.* waits? for it at the (all_.*|sum of gradients, 0\.bias), in (its|the) backward\n",
    "a_second_step_of_a_pipeline": r"call 4 of rank 2 is program 1 .*, call 2 since the last backward",
}


@pytest.mark.parametrize("name", SECOND)
def test_a_second_forward_of_one_rank_is_an_error_at_that_call(name: str, ended) -> None:
    end = ended[name]
    assert end.codes == [1] * WORLD, end
    for wrote in end.wrote:
        assert re.search("RuntimeMismatchError: .*" + SECOND[name], wrote), wrote
    assert re.search(rf"in {name}\n    model\(\)\n", end.wrote[2]), "at that call"


MISMATCHES = {
    "another_shape": ("call 6 of rank 2 is program 2 (plan", "inputs float64[32, 8]"),
    "a_new_shape": ("call 3 of rank 2 is the planning of a model", "call 3 of ranks 0-1, 3 is program "),
    "another_model": ("call 3 of rank 2 is program 1 (plan", "call 3 of ranks 0-1, 3 is program "),
    "once_more": ("call 3 of rank 2 is program 1 (plan", "call 3 of ranks 0-1, 3 is program ", "without gradients"),
    "an_input_without_values": (
        "call 4 of rank 2 is the planning of a model: input 0 is on the meta device: it has no values",
        "call 4 of ranks 0-1, 3 is program ",
    ),
    "without_gradients": ("call 3 of rank 2 is program 1 (plan", "without gradients"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_call_something_else_are_told_so(name: str, ended) -> None:
    end = ended[name]
    assert end.codes == [1] * WORLD, end
    for wrote in end.wrote:
        assert "RuntimeMismatchError: ranks do not call the same programs" in wrote, wrote
        for text in MISMATCHES[name]:
            assert text in wrote, wrote


@scenario
def alike(rank: int) -> None:
    """Everything that ranks may do alike, with ranks that are late."""
    model, other = Trained(), Trained()
    model.steps(2)
    time.sleep(0.7 * rank)
    model.steps(1, rows=32), other.steps(2)
    for _ in range(3):
        model.steps(1)
        with torch.no_grad():
            model(), other()
    with pytest.raises(sw.ShardwrightError):
        model(rows=7)  # which four ranks cannot cut
    model.steps(1)
    time.sleep(0.7 * rank)
    other.steps(1)
    dist.barrier()
    watchdog.GRACE = 0.5
    time.sleep(4 * (rank == 0))  # the end of the others is no reason to end
    sys.exit(5)


@scenario
def alike_in_a_pipeline(rank: int) -> None:
    """Two steps before one backward of both losses; the ranks of one stage alone sum gradients."""
    model = Pipelined(((1, 1), (1, 1), (1,)))
    model.steps(1)
    for _ in range(3):
        (model() + model()).backward()
    model.steps(1)
    dist.barrier()
    sys.exit(5)


@pytest.mark.parametrize("name", ["alike", "alike_in_a_pipeline"])
def test_ranks_that_do_alike_are_left_alone(name: str, ended) -> None:
    assert ended[name].codes == [5] * WORLD, ended[name]


@scenario
def evaluations_of_unequal_number(rank: int) -> None:
    """An evaluation sends nothing in data_parallel."""
    sw.init(timeout=60)
    net = nn.Linear(8, 4, dtype=D)
    model = sw.AutoParallel(net, None, "data_parallel")
    for _ in range(2):
        model(draw(4, 8)).sum().backward()
        with torch.no_grad():
            model(draw(4, 8))
            for _ in range(rank):
                model(draw(4, 8))
    dist.barrier()
    sys.exit(5)


def test_programs_that_send_nothing_are_not_counted(ended) -> None:
    assert ended["evaluations_of_unequal_number"].codes == [5] * WORLD, ended["evaluations_of_unequal_number"]


@scenario
def nobody_watches(rank: int) -> None:
    sw.init(watch=False)
    model = sw.AutoParallel(network(), nn.CrossEntropyLoss()).dataset_strategy("full_batch")
    model(draw(16, 8), labels(16)).backward()
    assert peers() is None and not watchdog._made
    dist.barrier()
    sys.exit(5)


def test_it_can_be_switched_off(ended) -> None:
    assert ended["nobody_watches"].codes == [5] * WORLD, ended["nobody_watches"]


# -- ranks that do not come --------------------------------------------------------------------------------------------


@scenario
def sleeps_before_a_step(rank: int) -> None:
    model = Trained()
    model.steps(2)
    grow_impatient()
    if rank == 2:
        time.sleep(600)
    model.steps(1)


@scenario
def sleeps_in_a_hook(rank: int) -> None:
    model = Trained()
    model.steps(1)
    grow_impatient()
    loss = model()
    if rank == 2:
        loss.register_hook(sleep_for_ever)
    loss.backward()


def sleep_for_ever(gradient: torch.Tensor) -> None:
    time.sleep(600)


@scenario
def is_stopped(rank: int) -> None:
    model = Trained()
    model.steps(2)
    grow_impatient()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    model.steps(1)


@scenario
def does_not_come_to_another_program(rank: int) -> None:
    model = Trained()
    model.steps(2)
    grow_impatient()
    if rank == 2:
        time.sleep(600)
    with torch.no_grad():
        model()


@scenario
def a_rank_of_a_stage_sleeps(rank: int) -> None:
    model = Pipelined()
    model.steps(1)
    grow_impatient()
    if rank == 2:
        time.sleep(600)
    model.steps(1)


@scenario
def a_device_hangs_behind_its_host(rank: int) -> None:
    """The hosts have queued a sum and wait for its result, outside of any wait point; rank 2 has not queued it."""
    model = Trained()
    model.steps(2)
    grow_impatient()
    passed = position.passed = PassedPlaces(Event)
    for place, done in (("the all_gather of w", True), ("the all_reduce of w", False), ("the all_gather of v", False)):
        if rank != 2 or done:
            Event.happens = done
            with waiting(WaitPoint(f"{place}, forward")):
                pass
    assert (passed.oldest() is None) == (rank == 2)
    time.sleep(600)


class Event:
    """An event of a device that is not there: it happens or not, as `happens` was when it was queued."""

    happens = True

    def record(self) -> None:
        self.done = Event.happens

    def query(self) -> bool:
        return self.done


STUCK = {
    "a_device_hangs_behind_its_host": r"rank 2 has not come to the all_reduce of w, forward in call 2; ranks 0-1, 3 "
    r"wait there since \d+ s\n  rank 2 is at test_watchdog.py:\d+ in a_device_hangs_behind_its_host",
    "a_rank_of_a_stage_sleeps": r"rank 2 has not come to the (gradient of value|all_reduce|reduce_scatter|all_gather) "
    r".* in call 2; .*\n  rank 2 is at test_watchdog.py:\d+ in a_rank_of_a_stage_sleeps",
    "sleeps_before_a_step": r"rank 2 has not come to the (all_reduce|reduce_scatter) .*for operator "
    r"'(linear|cross_entropy_loss)' \(test_watchdog.py:\d+\) in call 3; ranks? [\d, -]+ waits? there since \d+ s\n"
    r"  rank 2 is at test_watchdog.py:\d+ in sleeps_before_a_step, since call 2 began",
    "sleeps_in_a_hook": r"rank 2 has not come to the .*, in (its|the) backward, in call 2; .*\n  rank 2 is at "
    r"test_watchdog.py:\d+ in sleep_for_ever",
    "is_stopped": r"rank 2 has not come to the .* in call 3; .*\n  rank 2 does not answer",
    "does_not_come_to_another_program": r"rank 2 has not come to the start of program 1 .*without gradients in call 3; "
    r"ranks 0-1, 3 wait there",
}


@pytest.mark.parametrize("name", STUCK)
def test_a_rank_that_does_not_come_is_named_with_what_it_is_missing_from(name: str, ended) -> None:
    end = ended[name]
    answers = [rank for rank in range(WORLD) if not (name == "is_stopped" and rank == 2)]
    for rank in answers:
        assert end.codes[rank] == 1, end
        assert "StuckError" in end.wrote[rank], end.wrote[rank]
        assert re.search(STUCK[name], end.wrote[rank]), end.wrote[rank]
        last = end.wrote[rank].rpartition("errors.StuckError: ")[2]
        assert not re.search(r"Traceback|frame #", last), "the error is the last thing that is written"


@given(st.floats(1, 2000), st.floats(1, 2000), st.booleans())
def test_torchs_own_error_comes_after_the_verdict(asked: float, own: float, joined: bool) -> None:
    """Whatever timeout the user gives to `sw.init`, or to a process group of their own."""
    torchs = torch_timeout(asked).total_seconds() if joined else own
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "current", lambda: Runtime(True, 4, 0, torch.device("cpu"), asked))
        patch.setattr(watchdog, "group_timeout", lambda device: timedelta(seconds=torchs))
        patience, look = watchdog._patience()
    assert 0 < look <= min(1, patience / 4) and patience + watchdog.LOOKS * look <= torchs + 1e-3
    assert patience == pytest.approx(min(asked, patience)) and (not joined or patience > 0.999 * asked)


# -- ranks that die ----------------------------------------------------------------------------------------------------


@scenario
def is_killed_in_a_collective(rank: int) -> None:
    """Rank 2 dies while it is in the middle of a sum: from a thread, so that its main thread is inside."""
    import threading

    model = Trained()
    model.steps(2)

    def watch() -> None:
        while position.place is None:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 2:
        threading.Thread(target=watch, daemon=True).start()
    model.steps(500)


@scenario
def is_killed_while_planning(rank: int) -> None:
    model = Trained()
    if rank == 2:
        import shardwright.parallel.call_planning

        shardwright.parallel.call_planning.make_plan = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    model.steps(1)


@scenario
def is_killed_while_the_others_compute(rank: int) -> None:
    """No rank waits for it: the end of its process alone is noticed."""
    model = Trained()
    model.steps(2)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


@scenario
def rank_0_is_killed(rank: int) -> None:
    """Its process has the store by which the ranks talk."""
    model = Trained()
    model.steps(2)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


DEATHS = {
    "is_killed_in_a_collective": 2,
    "is_killed_while_planning": 2,
    "is_killed_while_the_others_compute": 2,
    "rank_0_is_killed": 0,
}


@pytest.mark.parametrize("name", DEATHS)
def test_when_a_rank_is_killed_the_others_end_and_name_it(name: str, ended) -> None:
    end, killed = ended[name], DEATHS[name]
    assert end.codes == [-signal.SIGKILL if rank == killed else 1 for rank in range(WORLD)], end
    for rank, wrote in enumerate(end.wrote):
        assert rank == killed or re.fullmatch(
            rf"shardwright.errors.StuckError: rank {killed} has ended without a word: process \d+ on the host \S+ was "
            "killed, or has crashed",
            wrote.rstrip().split("\n")[-1],
        ), wrote


# -- ranks that are told to end ----------------------------------------------------------------------------------------


def told_to_end(rank: int, whom: int, signals: int = 1) -> None:
    from shardwright.checkpoint.callback import Ending

    model, ending = Trained(), Ending()
    for step in range(100_000):
        model.steps(1)
        if (rank, step) == (whom, 5):
            os.kill(os.getpid(), signal.SIGTERM)
        if ending.due(step):
            tells(f"ends after step {step}")
            dist.barrier()  # a save, say
            ending.leave()


@scenario
def rank_0_is_told_to_end(rank: int) -> None:
    told_to_end(rank, 0)


@scenario
def rank_3_is_told_to_end(rank: int) -> None:
    told_to_end(rank, 3)


@scenario
def all_are_told_to_end_without_collectives(rank: int) -> None:
    """Nothing holds the ranks together, of which each is at another step when the signal comes."""
    from shardwright.checkpoint.callback import Ending

    model = Trained()
    model.steps(1)
    ending = Ending()
    for step in range(100_000):
        time.sleep(0.01 * (rank + 1))
        if step == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        if ending.due(step):
            tells(f"ends after step {step}")
            dist.barrier()
            ending.leave()


ENDINGS = ("rank_0_is_told_to_end", "rank_3_is_told_to_end", "all_are_told_to_end_without_collectives")


@pytest.mark.parametrize("name", ENDINGS)
def test_a_signal_ends_all_ranks_after_the_same_step(name: str, ended) -> None:
    end = ended[name]
    assert end.codes == [143] * WORLD, end
    steps = {re.search(r"ends after step (\d+)", wrote)[1] for wrote in end.wrote}
    assert len(steps) == 1 and int(steps.pop()) >= 5, end


def test_in_one_process_the_step_of_the_signal_is_the_last() -> None:
    from shardwright.checkpoint.callback import Ending

    before = signal.getsignal(signal.SIGTERM)
    ending = Ending()
    try:
        assert not ending.due(0) and not ending.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert ending.asked and ending.due(1)
        with pytest.raises(SystemExit) as exit:
            ending.leave()
        assert exit.value.code == 143
    finally:
        ending.close()
    assert signal.getsignal(signal.SIGTERM) == before


# -- calls, without ranks


class Alone:
    """Peers of rank 1 of two that are not there: a meeting asks its judge about the other's position, and goes on."""

    rank, world = 1, 2

    def __init__(self, other: Callable[[Seen], Seen]) -> None:
        self.store, self.other, self.judged = dist.HashStore(), other, []

    def wait(self, key: str, judge: Callable[[dict[int, Seen]], Exception | None]) -> None:
        mine = Seen(position.call, position.program, position.place.what, (), position.place.key, False, 0.0, "")
        self.judged.append(judge({0: self.other(mine), 1: mine}))


@pytest.fixture
def calls(monkeypatch) -> Callable[..., list[Exception | None]]:
    """``calls(text)``: the judgements at the meetings of rank 1, which plans, and then makes the calls of the text: "f"
    a forward, "b" a backward, "e" a forward without gradients. The other rank is in the backward of the call before."""

    def made(text: str) -> list[Exception | None]:
        waits = lambda mine: Seen(mine.call - 1, "p", "the sum of w, in its backward", (), "", True, 9.0, "")
        ranks = Alone(waits)
        steps = Steps(ranks)
        number = steps.made()
        for step in text:
            if step == "b":
                position.back = True
            else:
                with torch.set_grad_enabled(step == "f"):
                    steps.begin(number, "program 1", talks=True)
        return ranks.judged

    for name in ("call", "back", "program", "place", "moves"):
        monkeypatch.setattr(position, name, getattr(position, name))
    position.back = False
    return made


@pytest.mark.parametrize(
    "text, meetings",
    [
        ("fbfbfbfb", ""),  # nothing is sent
        ("ff", "x"),
        ("fbfbff", "x"),
        ("ffbffb", "x.x"),  # of a rank that does it alone
        ("fffff", "xxxx"),
        ("f" * 20, "xxxx"),  # without a backward at all
        ("fe", "x"),
        ("fbe", "."),
        ("fbeee", "."),
        ("fbefbe", "..."),
    ],
)
def test_a_call_before_the_backward_of_the_last_one_meets_and_is_judged(calls, text: str, meetings: str) -> None:
    """An x is an error: the other rank waits in a backward that this one has not made."""
    judged = calls(text)
    assert "".join("." if error is None else "x" for error in judged) == meetings
    for error in judged:
        assert error is None or (
            "without a backward of call" in error.message
            and "in which rank 0 waits for it at the sum of w, in its backward" in error.message
        )


# -- how scenarios run -------------------------------------------------------------------------------------------------


def on_a_rank(rank: int, name: str, meeting: Any, log: Path) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115  the test runner has another one in its place
    let_others_finish()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    join_group(rank, WORLD, meeting, 300)
    SCENARIOS[name](rank)


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Waves:
    """All that a first step loads is loaded here, before ranks are forked; their captures follow that of this one."""
    folder = tmp_path_factory.mktemp("failures")
    load_what_a_capture_needs()
    with rank_of_eight(rank=0, world=WORLD):
        model = sw.AutoParallel(network(), nn.CrossEntropyLoss()).dataset_strategy("full_batch")
        model(draw(16, 8), labels(16)).backward()
    return Waves(folder)


class Waves(dict):
    """The scenarios' ends by name; some scenarios at a time, when one of them is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> Ended:
        names = list(SCENARIOS)
        first = names.index(name) // AT_ONCE * AT_ONCE
        running = {other: start(other, self.folder) for other in names[first : first + AT_ONCE]}
        self.update({other: end(other, ranks, self.folder) for other, ranks in running.items()})
        return self[name]


def start(name: str, folder: Path) -> list[Any]:
    context = multiprocessing.get_context("fork")
    meeting = meeting_socket()
    ranks = [
        context.Process(target=on_a_rank, args=(r, name, meeting, folder / f"{name}_{r}"), daemon=True)
        for r in range(WORLD)
    ]
    for process in ranks:
        process.start()
    meeting.close()
    return ranks


def end(name: str, ranks: list[Any], folder: Path) -> Ended:
    deadline = time.monotonic() + DEADLINE
    for rank, process in enumerate(ranks):
        if not (name == "is_stopped" and rank == 2):
            process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill(), process.join()
    return Ended(codes, [(folder / f"{name}_{rank}").read_text() for rank in range(WORLD)])
