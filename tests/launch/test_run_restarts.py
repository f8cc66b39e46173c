"""``shardwright run``: workers that start again after a failure, and those that are given time to save."""

from __future__ import annotations

import re
import signal

import pytest
from test_run import SCRIPTS, Ended, alive, free_port, run, start, wait_until

RESUME, TRAIN, SAVES = (str(SCRIPTS / name) for name in ("resume.py", "train_and_resume.py", "save_at_the_end.py"))
SUM = sum(step * step for step in range(10))


def log(ended: Ended, name: str) -> str:
    return (ended.folder / "log_output" / name).read_text()


def test_workers_start_again_and_each_attempt_has_its_logs(tmp_path):
    stale = tmp_path / "log_output" / "restart_3"
    stale.mkdir(parents=True)
    (stale / "worker_0.log").write_text("of an earlier run")
    ended = run(tmp_path, "--worker_num=2", "--max_restarts=3", RESUME, 2, 3)
    assert ended.code == 0, ended.out
    assert re.findall(r"restart (\d of \d): all workers start again, logs in (\S+)", ended.out) == [
        ("1 of 3", "log_output/restart_1"),
        ("2 of 3", "log_output/restart_2"),
    ]
    assert ended.out.count("worker 1 failed (exit code 137, SIGKILL), ending the others") == 2
    assert ended.out.splitlines()[-1].endswith("logs in log_output/restart_2")
    assert log(ended, "worker_1.log") == "attempt 0 of 3 from step 0\n"
    assert log(ended, "restart_1/worker_1.log") == "attempt 1 of 3 from step 3\n"
    assert log(ended, "restart_2/worker_1.log") == f"attempt 2 of 3 from step 6\ntotal {SUM}\n"
    assert "total" not in log(ended, "worker_0.log") and log(ended, "restart_2/worker_0.log").endswith(f"total {SUM}\n")
    assert not stale.exists()


def test_the_last_failure_is_the_runs(tmp_path):
    ended = run(tmp_path, "--worker_num=2", "--max_restarts=1", RESUME, 9, 3)
    assert ended.code == 137
    assert (
        "worker 1 failed (exit code 137, SIGKILL), last lines of log_output/restart_1/worker_1.log:\nattempt 1 of 1 "
        "from step 3\nall logs are in log_output/restart_1" in ended.out
    )
    assert ended.out.count("last lines of") == 1


def test_workers_have_time_to_save(tmp_path):
    launcher = start(tmp_path, "--worker_num=2", "--max_restarts=3", SAVES)
    for rank in range(2):
        launcher.wait_for("ready", rank)
    launcher.process.terminate()
    ended = launcher.end()
    assert ended.code == 128 + signal.SIGTERM
    assert all((tmp_path / f"saved_{rank}").exists() for rank in range(2)), ended.out
    assert "restart" not in ended.out


def test_but_not_for_ever(tmp_path):
    launcher = start(tmp_path, "--worker_num=2", "--grace_period=0", SAVES)
    for rank in range(2):
        launcher.wait_for("ready", rank)
    launcher.process.terminate()
    ended = launcher.end()
    assert ended.code == 128 + signal.SIGTERM
    assert not any((tmp_path / f"saved_{rank}").exists() for rank in range(2))
    assert not any(alive(pid) for pid in ended.pids)


@pytest.mark.long
def test_a_failure_on_one_node_starts_the_workers_of_all_again(tmp_path):
    common = [
        "--worker_num=2",
        "--local_worker_num=1",
        "--master_addr=127.0.0.1",
        f"--master_port={free_port()}",
        "--max_restarts=1",
    ]
    nodes = [start(tmp_path, *common, f"--node_rank={node}", RESUME, 1, 3) for node in range(2)]
    here, there = nodes[0].end(), nodes[1].end()
    assert (here.code, there.code) == (0, 0), here.out + there.out
    assert "node 1: worker 1 failed (exit code 137, SIGKILL), ending the workers" in here.out
    assert all("restart 1 of 1" in ended.out for ended in (here, there))
    assert [log(here, f"restart_1/worker_{rank}.log").splitlines()[-1] for rank in range(2)] == [f"total {SUM}"] * 2


def losses(text: str) -> dict[int, str]:
    """By step, as the bits have it."""
    return {int(step): loss for step, loss in re.findall(r"step (\d+) (\S+x\S+)", text)}


@pytest.mark.long
def test_a_run_goes_on_from_its_last_checkpoint_and_saves_when_it_is_told_to_end(tmp_path):
    launcher = start(tmp_path, "--worker_num=2", "--max_restarts=2", TRAIN, "checkpoints", forks=True)
    again = tmp_path / "log_output" / "restart_1" / "worker_0.log"
    wait_until(lambda: again.exists() and "step 9 " in again.read_text(), "step 9 of the second attempt")
    launcher.process.terminate()
    ended = launcher.end()
    assert ended.code == 128 + signal.SIGTERM, ended.out
    assert ended.out.count("restart ") == 1 and "worker 1 failed (exit code 137, SIGKILL)" in ended.out
    # What was done again gives the same to the bit: dropout, AdamW's moments, everything is as it was.
    first, second = (losses(ended.log(0)), losses(again.read_text()))
    assert "from step 4\n" in again.read_text() and max(first) == 7
    assert {step: second[step] for step in (5, 6, 7)} == {step: first[step] for step in (5, 6, 7)}
    # Both workers ended after the same step, which is saved.
    last = [max(losses(log(ended, f"restart_1/worker_{rank}.log"))) for rank in range(2)]
    newest = max((tmp_path / "checkpoints").iterdir()).name
    assert last[0] == last[1] and newest == f"step-{last[0]:08d}", (last, newest)
    scheduler = log(ended, "scheduler.log")
    assert "worker 0 ended: exit code 143" in scheduler and "worker 1 ended: exit code 143" in scheduler
