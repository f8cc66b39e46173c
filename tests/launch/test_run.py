"""``shardwright run``: real launchers, real workers, real deaths."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_python import ForkedPython
from paths import SCRIPTS
from ranks import PATIENCE

from shardwright.cli.main import main
from shardwright.launch import console
from shardwright.launch.agent import Agent
from shardwright.launch.console import Watch, WorkerExit, last_lines, spelt

WORKER = str(SCRIPTS / "worker.py")


@dataclass
class Ended:
    """A launcher that has ended: its exit code, all it wrote, and where its workers wrote."""

    code: int
    out: str
    folder: Path

    def log(self, rank: int) -> str:
        return (self.folder / "log_output" / f"worker_{rank}.log").read_text()

    def facts(self, rank: int) -> dict:
        """The facts that worker.py told of itself in its first line."""
        return json.loads(self.log(rank).splitlines()[0])

    @property
    def files(self) -> list[str]:
        return sorted(os.listdir(self.folder / "log_output"))

    @property
    def pids(self) -> list[int]:
        return [int(pid) for pid in re.search(r"\(pids ([\d, ]+)\)", self.out)[1].split(", ")]


@dataclass
class Launcher:
    """A launcher that runs in a folder of its own."""

    process: subprocess.Popen
    folder: Path

    def end(self) -> Ended:
        try:
            out, _ = self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            out, _ = self.process.communicate(timeout=30)
            pytest.fail(f"the launcher did not end by itself; it wrote:\n{out}")
        return Ended(self.process.returncode, out, self.folder)

    def wait_for(self, text: str, rank: int) -> None:
        """Wait until the worker of this rank has written the text."""
        log = self.folder / "log_output" / f"worker_{rank}.log"
        wait_until(lambda: log.exists() and text in log.read_text(), f"{text!r} in {log}")


def _hears_ctrl_c() -> None:
    """A suite that runs in the background of a shell ignores Ctrl-C, and so would the launchers that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(
    folder: Path, *arguments: object, interpreter: bool = False, forks: bool = False, **environment: str
) -> Launcher:
    """Start a launcher: by an interpreter of its own, or as a `ForkedPython`, whose workers may be forked, too."""
    folder.mkdir(exist_ok=True)
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | environment
    made = partial(subprocess.Popen, preexec_fn=_hears_ctrl_c) if interpreter else partial(ForkedPython, forks=forks)
    process = made(
        [sys.executable, "-m", "shardwright", "run", *map(str, arguments)],
        cwd=folder,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return Launcher(process, folder)


def run(folder: Path, *arguments: object, **how: Any) -> Ended:
    return start(folder, *arguments, **how).end()


def wait_until(condition, what: str, patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# Runs that end well.


def test_every_worker_has_its_log_its_rank_and_its_arguments(tmp_path):
    arguments = ["--lr", "3", "--worker_num=9", "--", "-h", "${local_rank} $$"]
    ended = run(tmp_path, "--worker_num=3", "--threads=2", WORKER, "say", *arguments, interpreter=True)
    assert ended.code == 0, ended.out
    lines = ended.out.splitlines()
    assert lines[0].startswith("started 3 workers") and "log_output/worker_0.log" in lines[0]
    assert {"worker 0 finished", "worker 1 finished", "worker 2 finished"} == set(lines[1:4])
    assert re.fullmatch(r"all 3 workers finished in [\d.]+ s, logs in log_output", lines[4]) and len(lines) == 5
    for rank in range(3):
        facts = ended.facts(rank)
        assert facts["pid"] == ended.pids[rank]
        assert facts["argv"] == [WORKER, "say", *arguments]
        assert facts["path"] == str(SCRIPTS)
        token = facts["env"].pop("SHARDWRIGHT_RUN_TOKEN")
        assert len(token) == 32 and token == ended.facts(0)["env"]["SHARDWRIGHT_RUN_TOKEN"] and token not in ended.out
        port = facts["env"].pop("MASTER_PORT")
        assert int(port) > 0 and port == ended.facts(0)["env"]["MASTER_PORT"]
        assert facts["env"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "2",
        }
        # Both streams, in the order of writing, and nothing else.
        assert ended.log(rank).splitlines()[1:] == ["to the error stream", "to the output stream"]
    assert ended.files == ["scheduler.log", "worker_0.log", "worker_1.log", "worker_2.log"]
    scheduler = (tmp_path / "log_output" / "scheduler.log").read_text()
    assert "Rendezvous complete" in scheduler and "worker 2 ended: exit code 0" in scheduler


@pytest.mark.long
def test_workers_form_a_process_group_at_the_port_given(tmp_path):
    ended = run(
        tmp_path,
        "--local_worker_num=2",
        f"--master_port={free_port()}",
        "--join=true",
        SCRIPTS / "all_reduce.py",
        forks=True,
    )
    assert ended.code == 0, ended.out + ended.log(0)
    for rank in range(2):
        assert f"rank {rank} of 2: 3.0" in ended.log(rank)


def test_the_terminal_has_a_live_line(tmp_path):
    """With a terminal there is one line that is drawn again and again, and no trace of it at the end."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "shardwright", "run", "--worker_num=2", WORKER, "say"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"TERM": "xterm", "COLUMNS": "200"}, stdout=follower, stderr=follower
    )
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 4096):
            shown += part
    except OSError:
        pass  # how Linux tells that the other end is closed
    os.close(leader)
    assert process.wait(PATIENCE) == 0
    text = shown.decode()
    assert re.search(r"0:0\d  (starting|running: 0-1|finished: 0-1)", text), text
    assert text.rstrip().splitlines()[-1].endswith("logs in log_output")


# Runs that end badly.

DEATHS = {"raise": (1, "exit code 1"), "os_exit": (3, "exit code 3"), "kill": (137, "exit code 137, SIGKILL")}


@pytest.fixture(scope="module")
def deaths(tmp_path_factory):
    """Worker 1 of 3 dies, in every way; the launchers run at once."""
    launchers = {how: start(tmp_path_factory.mktemp(how), "--worker_num=3", WORKER, "fail", 1, how) for how in DEATHS}
    return {how: launcher.end() for how, launcher in launchers.items()}


@pytest.mark.parametrize("how", DEATHS)
def test_a_death_ends_the_run_with_its_code_and_its_last_lines(deaths, how):
    ended, (code, cause) = deaths[how], DEATHS[how]
    assert ended.code == code, ended.out
    head = f"worker 1 failed ({cause}), last lines of log_output/worker_1.log:"
    assert head in ended.out
    shown = ended.out.split(head + "\n")[1].splitlines()
    assert shown[-1] == "all logs are in log_output"
    assert shown[:-1] == ended.log(1).splitlines()[-20:]
    assert "line 29" in shown
    assert ("ValueError: the worker's [own] error" in shown) == (how == "raise")
    # What the coordinator itself has to say of it is not on the terminal.
    assert "torch/distributed" not in ended.out
    assert "SIGTERM" in (ended.folder / "log_output" / "scheduler.log").read_text()
    # The sleepers had ten minutes to go.
    assert not any(alive(pid) for pid in ended.pids)


def test_the_first_failure_is_told_from_those_it_causes():
    """The first failure is the earlier of two between two looks, whoever looks and in whatever order."""
    seen: list[WorkerExit] = []
    watch = Watch(seen.append)
    workers = [subprocess.Popen(["sh", "-c", f"read line; exit {3 + rank}"], stdin=subprocess.PIPE) for rank in (0, 1)]
    for rank, process in enumerate((*workers, subprocess.Popen(["true"]))):
        watch.follow(rank, process)
    for rank in (1, 0):
        workers[rank].stdin.close()
        wait_until(lambda: rank in [exit.rank for exit in seen], f"the exit of worker {rank}")
    watch.end()
    assert watch.first_failure == WorkerExit(rank=1, code=4, cause="exit code 4")


def test_the_exits_that_the_launcher_causes_are_recorded_last(monkeypatch):
    """Worker 1 fails, and its thread of the watch is woken late; worker 0 ends of the signal that follows."""
    waited, woken = console._wait, threading.Event()
    monkeypatch.setattr(
        console, "_wait", lambda process: (waited(process), process is not failed or woken.wait(PATIENCE))[0]
    )
    sleeper, failed = subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sh", "-c", "exit 4"])
    watch = Watch(lambda exit: None)
    for rank, process in enumerate((sleeper, failed)):
        watch.follow(rank, process)
    sleeper_thread = watch._threads[0]
    failed.wait()
    stub, settle = SimpleNamespace(_watch=watch, _grace=10), watch.settle
    # As soon as the launcher waits, and late where it does not.
    monkeypatch.setattr(watch, "settle", lambda: (woken.set(), settle(PATIENCE)))
    Agent._end_workers(stub, lambda number, grace: sleeper.send_signal(number))
    sleeper.wait()
    wait_until(lambda: not sleeper_thread.is_alive(), "the end of worker 0 to be recorded")
    woken.set()
    watch.end()
    assert watch.first_failure == WorkerExit(rank=1, code=4, cause="exit code 4")


def test_sigterm_of_the_launcher_ends_the_workers(tmp_path):
    launcher = start(tmp_path, "--worker_num=2", WORKER, "sleep")
    launcher.wait_for("to the output stream", rank=0)
    launcher.wait_for("to the output stream", rank=1)
    launcher.process.terminate()
    ended = launcher.end()
    assert ended.code == 128 + signal.SIGTERM
    assert "ended by SIGTERM, and the workers with it" in ended.out and "failed" not in ended.out
    assert not any(alive(pid) for pid in ended.pids)


@pytest.mark.parametrize(
    "script", [(str(SCRIPTS / "save_at_the_end.py"),), (WORKER, "stubborn")], ids=["saves", "deaf"]
)
def test_workers_do_not_outlive_a_launcher_that_is_killed(script, tmp_path):
    """A stopped worker goes on for its end, too; one that is deaf to SIGTERM is killed after the grace period."""
    launcher = start(tmp_path, "--worker_num=2", f"--grace_period={1 if 'stubborn' in script else 600}", *script)
    for rank in range(2):
        launcher.wait_for("to the output stream" if "stubborn" in script else "ready", rank)
    pids = [int(pid) for pid in re.search(r"\(pids ([\d, ]+)\)", launcher.process.stdout.readline())[1].split(", ")]
    os.kill(pids[1], signal.SIGSTOP)
    launcher.process.kill()
    launcher.end()
    wait_until(lambda: not any(alive(pid) for pid in pids), "the workers to end")
    assert [(tmp_path / f"saved_{rank}").exists() for rank in range(2)] == ["stubborn" not in script] * 2


def test_a_second_ctrl_c_does_not_wait_for_stubborn_workers(tmp_path):
    launcher = start(tmp_path, "--worker_num=2", "--grace_period=3600", WORKER, "stubborn")
    launcher.wait_for("to the output stream", rank=0)
    launcher.wait_for("to the output stream", rank=1)
    launcher.process.send_signal(signal.SIGINT)
    scheduler = tmp_path / "log_output" / "scheduler.log"
    wait_until(lambda: scheduler.read_text().count("closing signal SIGINT") == 2, "the first Ctrl-C to be passed on")
    launcher.process.send_signal(signal.SIGINT)
    ended = launcher.end()
    assert ended.code == 128 + signal.SIGINT
    assert not any(alive(pid) for pid in ended.pids)


# Several nodes, here on one machine.


@pytest.mark.long
def test_nodes_meet_and_a_failure_on_one_ends_the_other(tmp_path):
    common = ["--worker_num=2", "--local_worker_num=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    token = {"SHARDWRIGHT_RUN_TOKEN": "a token of the user's"}
    nodes = [start(tmp_path, *common, f"--node_rank={n}", WORKER, "fail", 1, "exit", **token) for n in range(2)]
    here, there = nodes[0].end(), nodes[1].end()
    assert (here.code, there.code) == (7, 7), here.out + there.out
    assert "the run failed on node 1: worker 1 failed (exit code 7)" in here.out
    assert "worker 1 failed (exit code 7), last lines of log_output/worker_1.log:" in there.out
    assert here.facts(1)["env"].items() >= token.items() and "can join" not in here.out
    assert [here.facts(rank)["env"]["LOCAL_RANK"] for rank in range(2)] == ["0", "0"]
    assert here.facts(0)["env"]["MASTER_PORT"] == here.facts(1)["env"]["MASTER_PORT"] == common[-1].split("=")[1]
    assert here.files == ["scheduler.log", "scheduler_1.log", "worker_0.log", "worker_1.log"]
    assert not any(alive(pid) for pid in here.pids + there.pids)


# Without waiting, and without workers.


@pytest.mark.long
def test_join_false_leaves_the_run_in_the_background(tmp_path):
    ended = run(tmp_path, "--worker_num=2", "--join=False", "--log_dir=logs", WORKER, "fail", 0, "exit")
    assert ended.code == 0, ended.out
    pid = int(re.search(r"in the background with pid (\d+) and writes to logs/scheduler.log", ended.out)[1])
    wait_until(lambda: "all logs are in logs" in (tmp_path / "logs" / "scheduler.log").read_text(), "the run's end")
    scheduler = (tmp_path / "logs" / "scheduler.log").read_text()
    assert "started 2 workers" in scheduler and "worker 0 failed (exit code 7), last lines of" in scheduler
    assert "to the output stream" in (tmp_path / "logs" / "worker_0.log").read_text()  # 1 may be ended before it writes
    # Nobody here is its parent; whoever is may leave it a zombie for a while.
    status = Path(f"/proc/{pid}/stat")
    wait_until(
        lambda: not alive(pid) or (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z"),
        "the launcher's end",
    )


def test_devices_runs_the_script_in_the_launcher_itself(tmp_path):
    launcher = start(tmp_path, "--devices", 8, WORKER, "fail", 0, "raise", "--devices=4")
    ended = launcher.end()
    lines = ended.out.splitlines()
    facts = json.loads(next(line for line in lines if line.startswith("{")))
    assert facts == {
        "pid": launcher.process.pid,
        "argv": [WORKER, "fail", "0", "raise", "--devices=4"],
        "path": str(SCRIPTS),
        "env": {"SHARDWRIGHT_DEVICES": "8"},
    }
    assert ended.code == 1 and lines[-1] == "ValueError: the worker's [own] error"
    assert not (tmp_path / "log_output").exists()


# Mistakes. They are found before torch is needed, so they are made in this process.


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: script"),
        (["--worker_num=2"], "the following arguments are required: script"),
        (["--worker_num=2", "nowhere.py"], "script nowhere.py is not found"),
        (["--worker_num=2", "."], "script . is not a file"),
        (["--worker_num=0", WORKER], "argument --worker_num: '0' is not a number from 1"),
        (["--local_worker_num=-1", WORKER], "argument --local_worker_num: '-1' is not a number from 1"),
        (["--worker_num=two", WORKER], "argument --worker_num: 'two' is not a number from 1"),
        (["--devices=0", WORKER], "argument --devices: '0' is not a number from 1"),
        (["--worker_num=2", "--master_port=65536", WORKER], "argument --master_port: '65536' is not a port"),
        (["--worker_num=2", "--join=maybe", WORKER], "argument --join: 'maybe' is neither True nor False"),
        (["--worker_num=2", "--lr=3", WORKER], "unrecognized arguments: --lr=3"),
        (["--worker=2", WORKER], "unrecognized arguments: --worker=2"),
        ([WORKER], "say how many workers to start"),
        (["--devices=8", "--worker_num=2", WORKER], "--worker_num is for workers"),
        (["--worker_num=3", "--local_worker_num=2", WORKER], "--worker_num=3 is not a whole number of nodes"),
        (["--worker_num=1", "--local_worker_num=2", WORKER], "--worker_num=1 is not a whole number of nodes"),
        (["--worker_num=4", "--local_worker_num=2", WORKER], "make 2 nodes: each needs the --master_addr"),
        (["--worker_num=2", "--node_rank=1", WORKER], "--node_rank=1 does not exist"),
        (["--worker_num=2", f"--log_dir={WORKER}", WORKER], "is a file"),
        (
            ["--worker_num=2", "--local_worker_num=1", "--master_addr=no.such.invalid", "--master_port=9", WORKER],
            "the address no.such.invalid is not known here",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(["run", *arguments])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("shardwright run: error: ") and error.count("\n") == 1 and message in error
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("join", ["True", "False"])
@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_a_busy_port_is_named(join, address, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.create_server((address, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SystemExit) as exit:
            main(["run", "--worker_num=2", f"--master_port={port}", f"--join={join}", WORKER, "say"])
    assert exit.value.code == 2
    assert f"port {port} (--master_port) is in use by another process" in capsys.readouterr().err


def test_a_token_that_could_be_guessed_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWRIGHT_RUN_TOKEN", "secret")
    with pytest.raises(SystemExit):
        main(["run", "--worker_num=2", WORKER, "say"])
    error = capsys.readouterr().err
    assert "SHARDWRIGHT_RUN_TOKEN has 6 characters; legal: 16 random ones or more" in error and "secret" not in error


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert re.fullmatch(r"shardwright \d\S*\n", capsys.readouterr().out)


def test_control_characters_of_a_log_are_shown_and_not_obeyed(tmp_path):
    log = tmp_path / "worker_0.log"
    log.write_text("\x1b[2J\x1b]0;title\x07a\tb\n\x9b31m\u202egnp.exe\n done\x08\x08\n ü✓\n")
    assert last_lines(str(log)) == [
        r"\x1b[2J\x1b]0;title\x07a" + "\tb", r"\x9b31m\u202egnp.exe", r" done\x08\x08", " ü✓"
    ]  # fmt: skip
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "".join(map(spelt, map(chr, range(256)))).replace("\n", ""))


def test_a_full_disk_is_named_beside_the_last_lines(tmp_path, small_disk):
    """The worker dies of a log that takes no more, in which it cannot say so; a second run is refused at its start."""
    script = tmp_path / "fills.py"
    script.write_text("while True:\n    print('x' * 1000)\n")
    logs = small_disk(256 << 10)
    ended = run(tmp_path, "--worker_num=1", f"--log_dir={logs}", script)
    assert ended.code == 1, ended.out
    assert f"{logs} takes no more bytes (No space left on device): lines may be missing from the logs" in ended.out
    (logs / "scheduler.log").write_bytes(b"")  # a run begins a new one
    again = run(tmp_path, "--worker_num=1", f"--log_dir={logs}", script)
    assert again.code == 2 and f"--log_dir={logs} cannot be written to: No space left on device" in again.out


def test_a_log_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "log_output" / "worker_0.log").mkdir(parents=True)
    ended = run(tmp_path, "--worker_num=1", WORKER, "say")
    assert ended.code == 1
    assert ended.out == "shardwright run: error: log_output/worker_0.log cannot be written: Is a directory\n"


def test_last_lines_are_what_a_terminal_would_show(tmp_path):
    log = tmp_path / "worker_0.log"
    assert last_lines(str(log)) == []
    log.write_bytes(b"")
    assert last_lines(str(log)) == []
    log.write_bytes(b"x" * 200_000 + b"\none\n 10%\r 50%\r100%\r\n\xff two\n\n")
    assert last_lines(str(log), 3) == ["one", "100%", "\N{REPLACEMENT CHARACTER} two"]
