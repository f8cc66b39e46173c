"""Rank tables: what they say, where they are wrong, and ranks that are started with one."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import multiprocessing
import os
import queue
import random
import re
import socket
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from launch_scripts import train
from ranks import PATIENCE
from test_environment import OMPI, TORCHRUN
from test_run import free_port
from torch import nn

import shardwright as sw
from shardwright.launch.environment import find
from shardwright.launch.rank_table import RankTable


def table(*servers: str, devices: int = 8) -> dict[str, Any]:
    """A table as the tutorials print them: servers of some devices, ranks in order."""
    listed = []
    for n, server in enumerate(servers):
        listed.append(
            {
                "server_id": server,
                "device": [
                    {
                        "device_id": str(d),
                        "device_ip": f"192.{1 + d % 4}.27.{6 + 2 * n + d // 4}",
                        "rank_id": str(n * devices + d),
                    }
                    for d in range(devices)
                ],
                "host_nic_ip": "reserve",
            }
        )
    return {"version": "1.0", "server_count": str(len(servers)), "server_list": listed, "status": "completed"}


EIGHT = table("10.155.111.140")
SIXTEEN = table("10.155.111.140", "10.155.111.141")


@pytest.fixture
def written(tmp_path):
    """Writes a table and returns its path."""

    def write(content: Any) -> str:
        path = tmp_path / "rank_table.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


# -- what a table says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content, master", [(EIGHT, "127.0.0.1"), (SIXTEEN, "10.155.111.140")])
def test_the_tables_of_the_tutorials(content, master, written) -> None:
    path, ranks = written(content), 8 * len(content["server_list"])
    for rank in range(ranks):
        place = find({"RANK_TABLE_FILE": path, "RANK_ID": str(rank), "DEVICE_ID": str(rank % 8)})
        assert (place.rank, place.size, place.device, place.devices) == (rank, ranks, rank % 8, 8)
        assert (place.master_addr, place.master_port, place.agent) == (master, 29500, False)
    assert RankTable.read(path).servers == tuple(server["server_id"] for server in content["server_list"])


def test_address_and_port_are_set_by_those_who_know_better(written) -> None:
    place = find(
        {"RANK_TABLE_FILE": written(SIXTEEN), "RANK_ID": "9", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"}
    )
    assert (place.master_addr, place.master_port, place.device) == ("10.0.0.7", 4000, 1)
    assert place.whereabouts(9) == "rank 9 (server 10.155.111.141, device 1)"


def test_servers_may_be_listed_and_devices_numbered_in_any_order(written) -> None:
    """Ranks follow the server ids, as text: 10.0.0.10 comes before 10.0.0.9."""
    content = table("10.0.0.10", "10.0.0.9", devices=2)
    content["server_list"].reverse()
    one, two = content["server_list"][1]["device"]
    one["rank_id"], two["rank_id"] = 1, 0  # numbers are as good as text
    one["device_id"], two["device_id"] = "4", "5"
    read = RankTable.read(written(content))
    assert [(d.rank, d.server, d.device) for d in read.devices] == [
        (0, "10.0.0.10", 5),
        (1, "10.0.0.10", 4),
        (2, "10.0.0.9", 0),
        (3, "10.0.0.9", 1),
    ]
    place = find({"RANK_TABLE_FILE": read.path, "RANK_ID": "0"})
    assert (place.master_addr, place.device, place.devices) == ("10.0.0.10", 5, 6)


# -- faults of a table ---------------------------------------------------------------------------------------------

S0, S1 = "server_list[0] (server 10.155.111.140)", "server_list[1] (server 10.155.111.141)"
DROP = object()

#: The path of an entry, what is put there, the entry that the error names, what it says, what would be legal.
FAULTS = [
    (("version",), "1.2", "version", 'unknown version "1.2"', '"1.0"'),
    (("version",), 1.0, "version", "unknown version 1.0", '"1.0"'),
    (("version",), DROP, "the table", "version is missing", '"version": "1.0"'),
    (("status",), "initializing", "status", '"initializing": the table is not whole', '"completed"'),
    (("status",), DROP, "the table", "status is missing", '"status": "completed"'),
    (("server_count",), "3", "server_count", "3, but server_list has 2", '"2"'),
    (("server_count",), "two", "the table, server_count", '"two" is not a whole number', '"2"'),
    (("server_count",), DROP, "the table", "server_count is missing", '"server_count": "2"'),
    (("server_list",), DROP, "the table", "server_list is missing", "server_list"),
    (("server_list",), [], "the table, server_list", "it is empty", "at least one"),
    (("server_list",), {}, "the table, server_list", "it is an object", "a list"),
    (("server_list", 1), "10.0.0.1", "server_list[1]", "it is a text", "server_id and device"),
    (("server_list", 1, "server_id"), DROP, "server_list[1]", "server_id is missing", "server_id"),
    (("server_list", 1, "server_id"), "", "server_list[1], server_id", "it is empty", "address"),
    (("server_list", 1, "server_id"), 5, "server_list[1], server_id", "it is a number", "address"),
    (
        ("server_list", 1, "server_id"),
        "10.155.111.140",
        "server_list[1] (server 10.155.111.140)",
        "server_id 10.155.111.140 is that of server_list[0] too",
        "each with its own id",
    ),
    (
        ("server_list", 1, "server_id"),
        "10.155.111.139",
        "server_list[1] (server 10.155.111.139), device[0]",
        "rank_id 8 comes after rank 7 of server 10.155.111.140",
        "10.155.111.139, 10.155.111.140",
    ),
    (("server_list", 1, "server_id"), "10.155.111.1400", None, None, None),  # greater as text: no fault
    (("server_list", 1, "device"), DROP, S1, "device is missing", "device"),
    (("server_list", 1, "device"), [], f"{S1}, device", "it is empty", "at least one"),
    (("server_list", 0, "device", 3), 7, f"{S0}, device[3]", "it is a number", "device_id, device_ip and rank_id"),
    (("server_list", 0, "device", 3, "rank_id"), DROP, f"{S0}, device[3]", "rank_id is missing", '"rank_id": "0"'),
    (("server_list", 0, "device", 3, "device_id"), DROP, f"{S0}, device[3]", "device_id is missing", "device_id"),
    (("server_list", 0, "device", 3, "device_ip"), DROP, f"{S0}, device[3]", "device_ip is missing", "device_ip"),
    (("server_list", 0, "device", 3, "rank_id"), "three", f"{S0}, device[3], rank_id", '"three" is not', "whole"),
    (("server_list", 0, "device", 3, "rank_id"), "-3", f"{S0}, device[3], rank_id", '"-3" is not', "whole"),
    (("server_list", 0, "device", 3, "rank_id"), "³", f"{S0}, device[3], rank_id", "is not a whole number", "whole"),
    (("server_list", 0, "device", 3, "rank_id"), True, f"{S0}, device[3], rank_id", "true is not", "whole"),
    (("server_list", 0, "device", 3, "device_id"), 3.5, f"{S0}, device[3], device_id", "3.5 is not", "whole"),
    (("server_list", 0, "device", 3, "device_ip"), None, f"{S0}, device[3], device_ip", "it is null", "address"),
    (
        ("server_list", 0, "device", 3, "rank_id"),
        "2",
        f"{S0}, device[3]",
        f"rank_id 2 is that of {S0}, device[2] too",
        "each rank once",
    ),
    (
        ("server_list", 1, "device", 3, "rank_id"),
        "2",
        f"{S1}, device[3]",
        f"rank_id 2 is that of {S0}, device[2] too",
        "each rank once",
    ),
    (
        ("server_list", 0, "device", 3, "rank_id"),
        "16",
        f"{S0}, device[3]",
        "rank_id 16, but no device has rank_id 3",
        "each of 0 to 15 once, for 16 devices",
    ),
    (
        ("server_list", 0, "device", 3, "device_id"),
        "2",
        f"{S0}, device[3]",
        "device_id 2 is that of device[2] too",
        "each device of a server once",
    ),
    (
        ("server_list", 0, "device", 3, "device_ip"),
        "192.3.27.6",
        f"{S0}, device[3]",
        "device_ip 192.3.27.6 is that of device[2] too",
        "an address of its own",
    ),
]


@pytest.mark.parametrize(
    "at, value, where, says, legal",
    FAULTS,
    ids=[f"{'.'.join(map(str, f[0]))}={'dropped' if f[1] is DROP else f[1]}" for f in FAULTS],
)
def test_a_fault_is_named_with_its_entry(at, value, where, says, legal, written) -> None:
    content = copy.deepcopy(SIXTEEN)
    entry = content
    for key in at[:-1]:
        entry = entry[key]
    if value is DROP:
        del entry[at[-1]]
    else:
        entry[at[-1]] = value
    path = written(content)
    if where is None:
        assert len(RankTable.read(path).devices) == 16
        return
    with pytest.raises(sw.SettingError) as raised:
        RankTable.read(path)
    assert raised.value.source == path and raised.value.message.startswith(f"{where}: "), raised.value
    assert says in raised.value.message and (legal in raised.value.legal or legal in raised.value.message)


def test_ranks_of_servers_may_not_alternate(written) -> None:
    content = copy.deepcopy(SIXTEEN)
    content["server_list"][0]["device"][7]["rank_id"] = "8"
    content["server_list"][1]["device"][0]["rank_id"] = "7"
    with pytest.raises(sw.SettingError, match=r"server_list\[0\].* device\[7\]: rank_id 8 comes after rank 7 of"):
        RankTable.read(written(content))


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", ":1: the rank table is no JSON, or cut short"),
        ("[1]", "the rank table is a list, and no object"),
        ('{"version": "1.0",\n"version": "1.0"}', ':2: the rank table is refused, at version: "version" stands twice'),
    ],
)
def test_what_is_no_table(text, says, written) -> None:
    with pytest.raises(sw.SettingError, match=re.escape(says)):
        RankTable.read(written(text))


def test_a_file_that_cannot_be_read(tmp_path) -> None:
    for path, reason in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(
            sw.SettingError, match=f"{path}: the rank table cannot be read: {reason}(.|\n)*RANK_TABLE_FILE"
        ):
            find({"RANK_TABLE_FILE": str(path), "RANK_ID": "0"})
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(sw.SettingError, match="it is not text"):
        find({"RANK_TABLE_FILE": str(tmp_path / "binary"), "RANK_ID": "0"})


@given(st.data())
def test_a_table_is_right_or_the_error_names_what_was_changed(tmp_path_factory, data) -> None:
    """Random servers and devices; then one number is made another one that is there already, or far away."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    rng = random.Random(data.draw(st.integers(0, 1000)))
    servers = sorted(f"10.0.{rng.randrange(100)}.{n}" for n in range(len(sizes)))
    ranks = iter(range(sum(sizes)))
    listed = []
    for server, size in zip(servers, sizes):
        own = [next(ranks) for _ in range(size)]
        devices = rng.sample(range(8), size)
        rng.shuffle(own)
        listed.append(
            {
                "server_id": server,
                "device": [
                    {"device_id": str(d), "device_ip": f"192.0.0.{d}", "rank_id": str(r)} for d, r in zip(devices, own)
                ],
            }
        )
    content = {
        "version": "1.0",
        "server_count": str(len(sizes)),
        "status": "completed",
        "server_list": rng.sample(listed, len(listed)),
    }
    path = tmp_path_factory.getbasetemp() / "random_table.json"
    path.write_text(json.dumps(content))
    read = RankTable.read(str(path))
    assert [d.rank for d in read.devices] == list(range(sum(sizes))) and list(read.servers) == servers
    for rank, device in enumerate(read.devices):
        beside = read.beside(rank)
        assert device in beside and len(beside) == sizes[servers.index(device.server)]

    place = data.draw(st.integers(0, len(sizes) - 1))
    entry = rng.choice(content["server_list"][place]["device"])
    field = data.draw(st.sampled_from(["rank_id", "device_id"]))
    others = {
        int(e[field])
        for s in (content["server_list"] if field == "rank_id" else [content["server_list"][place]])
        for e in s["device"]
    } - {int(entry[field])}
    wrong = data.draw(st.sampled_from(sorted(others | ({sum(sizes)} if field == "rank_id" else set())) or [-1]))
    entry[field] = str(wrong)
    path.write_text(json.dumps(content))
    with pytest.raises(sw.SettingError, match=f"{field}.*{wrong}|{wrong}.*{field}"):
        RankTable.read(str(path))


# -- beside other variables -----------------------------------------------------------------------------------------


def test_a_rank_table_beside_another_launcher(written) -> None:
    """mpirun or torchrun says which rank; the table says which device."""
    content = copy.deepcopy(EIGHT)
    for device in content["server_list"][0]["device"]:
        device["device_id"] = str(7 - int(device["device_id"]))
    path = written(content)
    eight = {**OMPI, "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "RANK_TABLE_FILE": path}
    assert (find(eight).rank, find(eight).device) == (3, 4)
    assert find({**eight, "RANK_ID": "3", "DEVICE_ID": "4", "RANK_SIZE": "8"}).device == 4
    under = find({**TORCHRUN, "WORLD_SIZE": "8", "RANK": "6", "RANK_TABLE_FILE": path})
    assert (under.rank, under.device, under.agent, under.master_port) == (6, 1, True, 29400)
    single = table("10.0.0.1", devices=1)
    assert find({"RANK_TABLE_FILE": written(single), "RANK_ID": "0"}) is None


@pytest.mark.parametrize(
    "environ, says, legal",
    [
        ({}, "RANK_ID is not", "RANK_ID from 0 to 7"),
        ({"RANK_ID": "8"}, "RANK_ID=8 is not in the rank table", "0 to 7"),
        ({"RANK_ID": "x"}, "RANK_ID=x", "a whole number"),
        (
            {"RANK_ID": "3", "DEVICE_ID": "2"},
            "DEVICE_ID=2, but rank 3 is device 3 of server 10.155.111.140",
            "DEVICE_ID=3",
        ),
        ({"RANK_ID": "3", "RANK_SIZE": "16"}, "RANK_SIZE=16, but the rank table has 8 devices", "RANK_SIZE=8"),
        (
            OMPI,
            "rank table's devices=8 (rank table) and OMPI_COMM_WORLD_SIZE=4|OMPI_COMM_WORLD_SIZE=4 (Open MPI) and the",
            "one launcher",
        ),
    ],
)
def test_variables_that_do_not_fit_the_table(environ, says, legal, written) -> None:
    with pytest.raises(sw.SettingError) as raised:
        find({**environ, "RANK_TABLE_FILE": written(EIGHT)})
    assert any(part in raised.value.message for part in says.split("|")) and legal in raised.value.legal


# -- real ranks ----------------------------------------------------------------------------------------------------


def rank(environ: dict[str, str], folder: str, timeout: float, answers: Any) -> None:
    """A rank in a process of its own: its identity, then three steps; or the error, or the code with which it ends."""
    name = environ.get("RANK_ID") or environ.get("MS_NODE_ID") or environ["MS_ROLE"]
    gc.freeze()  # what is inherited is not walked, or its pages would be copied
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    os.environ.update(environ)
    try:
        sw.init(timeout=timeout)
        train.main(folder, False)
        answers.put((name, None))
    except sw.SettingError as error:
        answers.put((name, error.message))
    except SystemExit as end:
        answers.put((name, f"exit {end.code}"))


def run_environments(environs: list[dict[str, str]], folder: Path, *timeouts: float) -> dict[str, str | None]:
    """Each rank's error by rank; forked, so that no rank imports torch anew. Its patience is 60 s if it has none."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [
        context.Process(target=rank, args=(environ, str(folder), timeout, answers), daemon=True)
        for environ, timeout in itertools.zip_longest(environs, timeouts, fillvalue=60.0)
    ]
    for process in ranks:
        process.start()
    try:
        return dict(answers.get(timeout=PATIENCE) for _ in ranks)
    except queue.Empty:
        pytest.fail(f"ranks that did not answer; exit codes {[process.exitcode for process in ranks]}")
    finally:
        for process in ranks:
            process.join(10)
            process.kill()


def step_once(devices: int) -> None:
    """One step here, so that the ranks inherit what it loads."""
    sw.init(devices=devices)
    net = train.network(devices)
    train.train(net, sw.AutoParallel(net, nn.CrossEntropyLoss()).dataset_strategy("full_batch"), 0)


def test_workers_of_msrun_train_as_one_device_and_its_scheduler_ends(tmp_path) -> None:
    """msrun starts the script in one process more than there are workers, and waits for all of them."""
    step_once(2)
    common = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(free_port())}
    ends = run_environments(
        [
            common | {"MS_ROLE": "MS_SCHED"},
            *(common | {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank)} for rank in range(2)),
        ],
        tmp_path,
    )
    assert ends == {"MS_SCHED": "exit 0", "0": None, "1": None}
    losses, _ = train.on_one_device()
    for r in range(2):
        facts = json.loads((tmp_path / f"rank_{r}.json").read_text())
        assert (facts["rank"], facts["size"], facts["processes"]) == (r, 2, True)
        assert facts["interface"].startswith("lo"), "Gloo listens on the loopback alone, too"
        assert facts["losses"] == pytest.approx(losses, abs=1e-12)


def test_two_servers_of_a_rank_table_train_as_one_device(written, tmp_path) -> None:
    """Both servers are this host, under two of its addresses."""
    step_once(4)
    path, port = written(table("127.0.0.1", "127.0.0.2", devices=2)), free_port()
    errors = run_environments(
        [
            {"RANK_TABLE_FILE": path, "RANK_ID": str(r), "DEVICE_ID": str(r % 2), "MASTER_PORT": str(port)}
            for r in range(4)
        ],
        tmp_path,
    )
    assert errors == dict.fromkeys("0123")
    losses, weight = train.on_one_device()
    for r in range(4):
        facts = json.loads((tmp_path / f"rank_{r}.json").read_text())
        assert (facts["rank"], facts["size"], facts["local"]) == (r, 4, [24, 6])
        assert facts["losses"] == pytest.approx(losses, abs=1e-12)
        assert [*chain(*facts["weight"])] == pytest.approx([*chain(*weight)], abs=1e-12)


def test_ranks_that_do_not_come_are_named_to_those_that_did(written, tmp_path) -> None:
    path, port = written(table("127.0.0.1", "127.0.0.2", devices=2)), str(free_port())
    errors = run_environments(
        [{"RANK_TABLE_FILE": path, "RANK_ID": r, "MASTER_PORT": port} for r in "02"], tmp_path, 3, 60
    )
    missing = (
        f"rank 1 (server 127.0.0.1, device 1), rank 3 (server 127.0.0.2, device 1) of the 4 ranks that rank table "
        f"counts did not come to 127.0.0.1:{port}"
    )
    assert all(error.startswith(missing) for error in errors.values()), errors  # rank 2's from rank 0
    [error] = run_environments([{"RANK_TABLE_FILE": path, "RANK_ID": "3", "MASTER_PORT": port}], tmp_path, 1).values()
    assert error.startswith(f"rank 0 (server 127.0.0.1, device 0) did not answer at 127.0.0.1:{port} within 1 s")


def test_ranks_with_different_tables_or_the_same_rank_do_not_start(written, tmp_path) -> None:
    path, port = written(table("127.0.0.1", devices=3)), str(free_port())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(table("127.0.0.2", devices=3)))
    errors = run_environments(
        [
            {"RANK_TABLE_FILE": path, "RANK_ID": "0", "MASTER_PORT": port},
            {"RANK_TABLE_FILE": str(other), "RANK_ID": "1", "MASTER_PORT": port},
        ],
        tmp_path,
    )
    assert all("was told of 3 ranks of rank table" in error for error in errors.values()), errors
    port = str(free_port())
    errors = run_environments([{"RANK_TABLE_FILE": path, "RANK_ID": r, "MASTER_PORT": port} for r in "011"], tmp_path)
    assert all("two processes that are rank 1 have come" in error for error in errors.values()), errors


def test_a_port_in_use_is_named(written, tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        errors = run_environments(
            [{"RANK_TABLE_FILE": written(table("s", devices=2)), "RANK_ID": "0", "MASTER_PORT": port}], tmp_path, 5
        )
    assert errors == {"0": f"port {port} (MASTER_PORT) is in use by another process; set another"}
