"""``shardwright run`` on several hosts: network namespaces with addresses of their own, joined by a virtual cable."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked_python import ForkedPython
from launch_scripts import train
from paths import SCRIPTS
from test_run import Launcher, alive, free_port, wait_until
from torch.distributed import HashStore, TCPStore

import shardwright.launch.rendezvous as rendezvous
from shardwright import SettingError
from shardwright.launch.environment import RankInRun, leading_to
from shardwright.launch.rendezvous import LaunchError, NodeFailure, Nodes, admitted, listening, meet
from shardwright.launch.run_settings import RunSettings, bound

PORT = 29400  # a host of its own has all ports to itself


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    name: str
    address: str

    def command(self, *command: object) -> list[str]:
        return ["ip", "netns", "exec", self.name, *map(str, command)]

    def start(self, folder: Path, *arguments: object) -> Launcher:
        folder.mkdir(exist_ok=True)
        process = ForkedPython(
            self.command(sys.executable, "-m", "shardwright", "run", *arguments),
            forks=True,
            cwd=folder,
            env={n: v for n, v in os.environ.items() if not n.startswith("GLOO_")},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return Launcher(process, folder)


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, 10.83.0.1 and 10.83.0.2, that reach each other and nobody else."""
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and the command ip")
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces")
    pair = tuple(Host(f"shardwright-{os.getpid()}-{n}", f"10.83.0.{n}") for n in (1, 2))
    one, two = (host.name for host in pair)
    cable = (
        ("netns", "add", one),
        ("netns", "add", two),
        ("link", "add", "cable1", "netns", one, "type", "veth", "peer", "name", "cable2", "netns", two),
        *(
            (("-n", host.name, *rest))
            for n, host in enumerate(pair, 1)
            for rest in (
                ("address", "add", f"{host.address}/24", "dev", f"cable{n}"),
                ("link", "set", f"cable{n}", "up"),
                ("link", "set", "lo", "up"),
            )
        ),
    )
    try:
        for step in cable:
            done = ip(*step)
            if done.returncode:
                pytest.skip(f"no network namespaces here: ip {' '.join(step)}: {done.stderr.strip()}")
        yield pair
    finally:
        for host in pair:
            ip("netns", "delete", host.name)


@pytest.mark.long
def test_two_hosts_train_as_one_device_and_a_death_on_one_ends_both(hosts, tmp_path):
    one, _two = hosts
    facts = tmp_path / "facts"
    facts.mkdir()
    common = [
        "--worker_num=4",
        "--local_worker_num=2",
        f"--master_addr={one.address}",
        f"--master_port={PORT}",
        "--cluster_time_out=300",
    ]
    launchers = [
        host.start(tmp_path / f"host{n}", *common, f"--node_rank={n}", SCRIPTS / "train.py", facts, "forever")
        for n, host in enumerate(hosts)
    ]
    try:
        wait_until(
            lambda: len(list(facts.glob("*.json"))) == 4 or any(launcher.process.poll() for launcher in launchers),
            "three steps of four ranks",
            patience=300,
        )  # six processes that import torch
        reported = [json.loads(file.read_text()) for file in sorted(facts.glob("*.json"))]
        if len(reported) == 4:
            os.kill(reported[3]["pid"], signal.SIGKILL)
        here, there = (launcher.end() for launcher in launchers)
    finally:
        for launcher in launchers:
            launcher.process.kill()

    assert len(reported) == 4, here.out + there.out
    losses, weight = train.on_one_device()
    for rank in range(4):
        assert (reported[rank]["rank"], reported[rank]["size"], reported[rank]["processes"]) == (rank, 4, True)
        assert reported[rank]["losses"] == pytest.approx(losses, abs=1e-12) and reported[rank]["local"] == [24, 6]
        assert [*chain(*reported[rank]["weight"])] == pytest.approx([*chain(*weight)], abs=1e-12)
        assert reported[rank]["interface"] == f"cable{1 + rank // 2}"  # that of the host's own name leads nowhere
    assert (here.code, there.code) == (137, 137), here.out + there.out
    assert "worker 3 failed (exit code 137, SIGKILL), last lines of log_output/worker_3.log:" in there.out
    assert "the run failed on node 1: worker 3 failed (exit code 137, SIGKILL)" in here.out
    assert not any(alive(rank["pid"]) for rank in reported)


@pytest.mark.long
def test_two_hosts_finish_together(hosts, tmp_path):
    common = ["--worker_num=4", "--local_worker_num=2", f"--master_addr={hosts[0].address}", f"--master_port={PORT}"]
    launchers = [
        host.start(tmp_path / f"host{n}", *common, f"--node_rank={n}", SCRIPTS / "worker.py", "say")
        for n, host in enumerate(hosts)
    ]
    for n, ended in enumerate([launcher.end() for launcher in launchers]):
        assert ended.code == 0 and "all 4 workers finished" in ended.out, ended.out
        for rank in (2 * n, 2 * n + 1):
            assert ended.facts(rank)["env"] == {
                "SHARDWRIGHT_RUN_TOKEN": "",
                "RANK": str(rank),
                "WORLD_SIZE": "4",
                "LOCAL_RANK": str(rank % 2),
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": str(PORT),
                "OMP_NUM_THREADS": "1",
            }


@pytest.mark.long
def test_a_host_that_never_comes_is_named_on_those_that_did(hosts, tmp_path):
    common = ["--worker_num=3", "--local_worker_num=1", f"--master_addr={hosts[0].address}", f"--master_port={PORT}"]
    late = hosts[1].start(
        tmp_path / "host1", *common, "--cluster_time_out=300", "--node_rank=1", SCRIPTS / "worker.py", "say"
    )
    # Started: how long the import of torch takes is not for node 0 to wait for.
    assert late.process.stdout.readline() == f"node 1: waiting for node 0 at {hosts[0].address}:{PORT}\n"
    first = hosts[0].start(
        tmp_path / "host0", *common, "--cluster_time_out=4", "--node_rank=0", SCRIPTS / "worker.py", "say"
    )
    here, there = first.end(), late.end()
    assert (here.code, there.code) == (1, 1), here.out + there.out
    missing = "node 2 did not come within 4 s, 2 of 3 did"
    assert missing in here.out
    assert f"node 0 gave up waiting: {missing}" in there.out
    assert "started" not in here.out + there.out


# Nodes of one process: what the launchers ask of the store, without launchers.


def nodes(count: int, *seconds: int) -> list[Nodes]:
    """The nodes of one run that come, each with the seconds that it waits for the others; all, if nothing is said."""
    port = free_port()
    return [
        Nodes(RunSettings("", (), count, 1, "127.0.0.1", port, node, "", wait, None), lambda line: None)
        for node, wait in enumerate(seconds or (60,) * count)
    ]


def at_once(actions: list) -> list:
    """Results or errors of the actions; all run at the same time."""
    results: list = [None] * len(actions)

    def act(n: int) -> None:
        try:
            results[n] = actions[n]()
        except LaunchError as error:
            results[n] = error

    threads = [threading.Thread(target=act, args=(n,)) for n in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_first_node_that_never_comes_is_named():
    [error] = at_once([nodes(2, 1, 1)[1].next_rendezvous])
    assert re.match(r"node 0 did not answer at 127\.0\.0\.1:\d+ within 1 s", error.message)


def test_the_first_to_give_up_names_the_missing_nodes_to_all():
    """One has the least patience; that it is node 0, which holds the store, makes no difference."""
    for waits in ((3, 60, 60), (60, 60, 3)):
        text = "nodes 3, 4 did not come within 3 s, 3 of 5 did"
        for wait, error in zip(waits, at_once([node.next_rendezvous for node in nodes(5, *waits)]), strict=True):
            assert isinstance(error, LaunchError)
            assert error.message == (text if wait == 3 else f"node {waits.index(3)} gave up waiting: {text}")


def test_a_node_that_is_no_longer_heard_of_ends_the_run(monkeypatch):
    """A lost host tells nobody: the others learn it from its silence, and who is not yet silent is not lost."""
    three = nodes(3)
    at_once([node.next_rendezvous for node in three])
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(rendezvous, "time", clock)
    for _ in range(5):
        assert [node.heard(now=True) for node in three] == [None] * 3
        now[0] += 0.6 * rendezvous.SILENT  # and so in sum more than that
    for _ in range(2):
        assert [node.heard(now=True) for node in three[:2]] == [None] * 2
        now[0] += 0.6 * rendezvous.SILENT
    lost = NodeFailure(2, 1, "nothing was heard of it for 20 s")
    assert [node.heard(now=True) for node in three[:2]] == [lost] * 2
    assert three[2].heard(now=True) == lost  # should it live after all: its run is over


# Who may come.


def listened(port: int) -> set[str]:
    """The addresses at which this host listens on a port, as the kernel writes them."""
    lines = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()[1:]]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and int(line[1].split(":")[1], 16) == port}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's list of sockets is Linux's")
def test_a_run_of_one_host_listens_on_the_loopback_alone():
    [node] = nodes(1)
    port = node.next_rendezvous().bootstrap_store_info.master_port
    assert listened(port) == {"0100007F"}
    node.attempt = 1
    again = node.next_rendezvous().bootstrap_store_info.master_port
    assert again != port and listened(again) == {"0100007F"}
    held = meet(RankInRun("torchrun", 0, 1, 0, 1, "127.0.0.1", other := free_port()), 5, "")
    assert listened(other) == {"0100007F"}
    del held


def test_an_address_that_is_not_this_hosts_is_listened_for_on_all(caplog, monkeypatch):
    """The address of a router in front; a name that is a loopback address here, and another one elsewhere."""
    everywhere = ("::", "0.0.0.0")
    for address, several, expected in (
        ("192.0.2.1", True, everywhere),  # of a net for documentation: nobody's
        ("127.0.0.1", True, ("127.0.0.1",)),
        ("localhost", True, ("127.0.0.1", "::1")),
        (socket.gethostname(), False, None),
    ):
        with bound(address, 0, several) as held:
            assert expected is None or held.getsockname()[0] in expected
    monkeypatch.setattr(rendezvous, "TCPStore", lambda *place, master_listen_fd, **how: os.close(master_listen_fd))
    listening("127.0.0.1", 0, True, 5)
    assert caplog.text == ""
    listening("192.0.2.1", 0, True, 5)
    assert "192.0.2.1 is no address of this host that others reach: the rendezvous listens on all addr" in caplog.text
    names = {"node1": [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 0))]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda name, *rest, **kwargs: names[name])
        with bound("node1", 0, True) as held:
            assert held.getsockname()[0] in everywhere
        with bound("node1", 0, False) as held:
            assert held.getsockname()[0] == "127.0.1.1"


TOKENS = ("a" * 16, "b" * 16, "")


@pytest.mark.parametrize("theirs", TOKENS)
@pytest.mark.parametrize("ours", TOKENS)
def test_those_who_know_the_token_are_taken_and_nobody_else(ours, theirs):
    store = HashStore()
    admitted(store, theirs, True, "the run").set("key", "value")
    if ours == theirs:
        assert admitted(store, ours, False, "the run").get("key") == b"value"
        return
    with pytest.raises(SettingError) as error:
        admitted(store, ours, False, "the run")
    assert "SHARDWRIGHT_RUN_TOKEN the same" in error.value.legal
    assert error.value.message == (
        "this process has a token, and the run has none"
        if not theirs
        else f"the run takes those alone who know its token, and this process has {'another' if ours else 'no'} token"
    )
    assert not any(token and token in repr(error.value) for token in TOKENS)


def test_a_node_without_the_token_is_told_so_and_the_others_meet():
    port = free_port()
    words: list[str] = []
    three = [
        Nodes(RunSettings("", (), 2, 1, "127.0.0.1", port, node, "", 60, None, token=token), words.append)
        for node, token in ((0, TOKENS[0]), (1, TOKENS[0]), (1, ""))
    ]
    infos = at_once([node.next_rendezvous for node in three])
    assert [getattr(info, "world_size", None) for info in infos] == [2, 2, None]
    assert infos[2].message == (
        f"node 1: the run at 127.0.0.1:{port} takes those alone who know its token, and this process has no token"
    )
    stranger = TCPStore("127.0.0.1", port, is_master=False)
    assert not stranger.check(["shardwright/0/nodes"]) and stranger.get("shardwright/proof") not in (b"", TOKENS[0])
    assert not any("can join" in line for line in words)
    at_once([nodes(1)[0].next_rendezvous])


def test_a_run_of_several_nodes_without_a_token_says_so():
    words: list[str] = []
    node = Nodes(RunSettings("", (), 2, 1, "127.0.0.1", free_port(), 0, "", 1, None), words.append)
    at_once([node.next_rendezvous])
    assert any("no SHARDWRIGHT_RUN_TOKEN is set: whoever reaches 127.0.0.1:" in line for line in words)


def test_the_interface_that_leads_to_an_address():
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    assert [leading_to("127.0.0.1", 1)] == [leading_to("localhost", 1)] == loopback[:1]
    assert leading_to("no.such.host.invalid", 1) is None


@pytest.mark.long
def test_the_interface_of_a_host(hosts):
    for host, name in zip(hosts, ("cable1", "cable2")):
        for other in hosts:
            words = subprocess.run(
                host.command(
                    sys.executable,
                    "-c",
                    "import sys\n"
                    "from shardwright.launch.environment import leading_to\n"
                    f"print(leading_to({other.address!r}, 1))",
                ),
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert words.stdout.strip() == name, words.stderr
