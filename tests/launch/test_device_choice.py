"""The device of a process, on hosts whose accelerators are not there: the test answers the questions to torch."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
import warnings
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import PATIENCE, run_ranks
from torch import nn

import shardwright as sw
from shardwright import process_runtime as process
from shardwright.launch import device_choice
from shardwright.launch.environment import RankInRun

WAIT = timedelta(seconds=20)


class Host:
    """A host with so many accelerators; `index` is the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.index = 0
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda") if count else None
        )
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: self.index)
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: setattr(self, "index", index))


def place(rank: int, devices: int, size: int | None = None) -> RankInRun:
    """Rank `rank` of a run on one host that has to have so many devices."""
    return RankInRun("torchrun", rank, size or devices, rank, devices, "127.0.0.1", 1)


@pytest.mark.parametrize(
    "count, rank, devices, given, wanted",
    [
        (0, 3, 8, {}, "cpu"),
        (8, 3, 8, {}, "cuda:3"),
        (1, 3, 8, {}, "cuda:0"),  # Slurm's --gpus-per-task=1
        (1, 0, 1, {}, "cuda:0"),
        (8, 3, 8, {"backend": "gloo"}, "cpu"),
        (8, 3, 8, {"backend": "nccl"}, "cuda:3"),
        (8, 3, 8, {"device": torch.device("cpu")}, "cpu"),
        (8, 3, 8, {"device": torch.device("cuda", 5)}, "cuda:5"),
        (8, 3, 8, {"device": torch.device("cuda")}, "cuda:3"),
        (8, 3, 8, {"device": torch.device("cuda"), "backend": "gloo"}, "cuda:3"),
        (2, 3, 8, {"device": torch.device("cpu")}, "cpu"),
    ],
)
def test_the_device_of_a_rank(monkeypatch, count: int, rank: int, devices: int, given: dict[str, Any], wanted: str):
    host = Host(monkeypatch, count)
    assert str(device_choice.device_of_rank(place(rank, devices), **given)) == wanted
    assert host.index == (int(wanted.partition(":")[2]) if wanted != "cpu" else 0)


@pytest.mark.parametrize("count, devices", [(4, 8), (2, 3), (7, 8)])
def test_fewer_accelerators_than_processes_are_an_error_on_every_rank(monkeypatch, count: int, devices: int) -> None:
    Host(monkeypatch, count)
    for rank in range(devices):
        with pytest.raises(sw.SettingError, match=f"{devices} processes run on the host .* {count} acc") as raised:
            device_choice.device_of_rank(place(rank, devices))
        assert f"{count} processes" in raised.value.legal


@pytest.mark.parametrize(
    "backend, bound, set_, agrees, given, wanted",
    [
        ("cpu:gloo,cuda:gloo", None, 0, False, None, "cpu"),
        ("cpu:gloo,cuda:nccl", None, 5, False, None, "cuda:5"),  # the user's set_device
        ("cpu:gloo,cuda:nccl", None, 5, True, None, "cuda:5"),
        ("cpu:gloo,cuda:nccl", None, 0, True, None, "cuda:3"),  # nothing was set: as under a launcher
        ("cuda:nccl", torch.device("cuda", 6), 5, True, None, "cuda:6"),
        ("cpu:gloo,cuda:gloo", None, 2, False, torch.device("cuda"), "cuda:2"),
        ("cuda:nccl", None, 2, False, torch.device("cpu"), "cpu"),
    ],
)
def test_a_group_of_the_user_keeps_the_users_device(monkeypatch, backend, bound, set_, agrees, given, wanted) -> None:
    host = Host(monkeypatch, 8)
    host.index = set_
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=bound)))
    assert str(device_choice.device_of_group(place(3, 8) if agrees else None, given)) == wanted


@pytest.mark.parametrize("wrong", ["cuda", "cuda:0", "gpu", "meta", 1.5])
def test_a_device_that_is_not_there(wrong: Any) -> None:
    with pytest.raises(sw.SettingError, match="device") as raised:
        sw.init(device=wrong)
    assert "cpu" in raised.value.legal


def test_the_device_of_the_local_runtime(monkeypatch) -> None:
    Host(monkeypatch, 2)
    assert str(device_choice.asked_device("cuda:1")) == "cuda:1" and device_choice.asked_device(None) is None
    with pytest.raises(sw.SettingError, match="no such device") as raised:
        device_choice.asked_device("cuda:2")
    assert raised.value.legal == "cpu, cuda:0, cuda:1"


@pytest.mark.parametrize(
    "given, environment, reason",
    [
        ({"backend": "nccl"}, {}, "the backend 'nccl' communicates on accelerators alone"),
        ({"backend": "cuda:nccl"}, {}, "the backend 'cuda:nccl'"),
        ({"backend": "hccl"}, {}, "the backend 'hccl'"),
        ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES=0,1"),
        ({}, {"SLURM_GPUS_PER_TASK": "1"}, "SLURM_GPUS_PER_TASK=1"),
        ({}, {"ASCEND_RT_VISIBLE_DEVICES": "3"}, "ASCEND_RT_VISIBLE_DEVICES=3"),
    ],
)
def test_an_implied_accelerator_that_is_not_there_is_an_error(monkeypatch, given, environment, reason: str) -> None:
    """The CPU would be taken in silence."""
    Host(monkeypatch, 0)
    with pytest.raises(sw.SettingError, match=reason) as raised:
        device_choice.device_of_rank(place(0, 8), **given, environment=environment)
    assert "sees no accelerator" in raised.value.message and "init(device='cpu')" in raised.value.legal
    cpu = device_choice.device_of_rank(place(0, 8), "gloo", environment=environment)
    assert cpu == device_choice.device_of_rank(place(0, 8), None, torch.device("cpu"), environment)


@pytest.mark.parametrize(
    "given, environment",
    [
        ({"backend": "cpu:gloo,cuda:nccl"}, {}),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}),
        ({}, {"CUDA_VISIBLE_DEVICES": "-1", "SLURM_GPUS_PER_TASK": "1"}),
    ],
)
def test_the_cpu_is_taken_where_no_accelerator_is_implied(monkeypatch, given, environment) -> None:
    Host(monkeypatch, 0)
    assert device_choice.device_of_rank(place(0, 8), **given, environment=environment) == torch.device("cpu")


def test_a_group_of_accelerators_alone_without_one_is_an_error(monkeypatch) -> None:
    Host(monkeypatch, 0)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(sw.SettingError, match="communicates on accelerators alone"):
        device_choice.device_of_group(None)


def test_the_cpu_is_never_taken_without_a_word(monkeypatch) -> None:
    cpu, remark = torch.device("cpu"), device_choice.cpu_remark
    host = Host(monkeypatch, 8)
    host.index = 5
    text = remark(cpu, False)
    assert text is not None and "compute on the CPU: the process group is one of Gloo" in text and "number 5" in text
    assert remark(cpu, True) is None and remark(torch.device("cuda", 5), False) is None
    Host(monkeypatch, 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=True: torch.device("cuda"))
    text = remark(cpu, False)
    assert text is not None and "torch is built for cuda and sees no accelerator" in text
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=True: None)
    assert remark(cpu, False) is None


def test_the_remark_is_made_once_in_a_group_of_the_user(monkeypatch) -> None:
    monkeypatch.setattr(process, "cpu_remark", lambda device, asked: None if asked else "on the CPU")
    for rank, given, count in ((0, {}, 1), (1, {}, 0), (0, {"device": "cpu"}, 0)):
        monkeypatch.setattr(process, "_current", [])
        monkeypatch.setattr(process, "_address_of_group", lambda: None)
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            sw.init(watch=False, **given)
        assert [str(each.message) for each in seen] == ["on the CPU"] * count


Found = str | sw.SettingError


def together(
    devices: Sequence[Found], uuids: Sequence[str | None], store: dist.Store | None = None, visible: int = 8
) -> tuple[list[Exception | None], list[str]]:
    """The error of each rank, and the remarks."""
    store, out, remarks = store or dist.HashStore(), [None] * len(devices), []
    ranks = {threading.get_ident(): 0}

    def run(rank: int) -> None:
        ranks[threading.get_ident()] = rank
        found = devices[rank]
        companions = device_choice.Companions(store, rank, len(devices), "one process each")
        try:
            companions.tell(torch.device(found) if isinstance(found, str) else found)
            remarks.append(companions.check(WAIT))
        except sw.SettingError as error:
            out[rank] = error

    def module(kind: str) -> Any:
        uuid = uuids[ranks[threading.get_ident()]]
        return SimpleNamespace(
            get_device_properties=lambda index: SimpleNamespace() if uuid is None else SimpleNamespace(uuid=uuid)
        )

    with pytest.MonkeyPatch.context() as patch:
        Host(patch, visible)
        patch.setattr(torch, "get_device_module", module)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(devices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return out, [remark for remark in remarks if remark is not None]


def test_each_rank_with_a_device_of_its_own() -> None:
    store = dist.HashStore()
    for _ in range(3):  # workers that are started anew meet in the same store
        assert together(["cuda:0"] * 4, ["a", "b", "c", "d"], store) == ([None] * 4, [])
    assert together(["cpu"] * 3, ["x"] * 3) == ([None] * 3, [])
    assert together(["cuda:0", "cuda:1"], [None, None]) == ([None] * 2, [])


def alike(found: tuple[list[Exception | None], list[str]]) -> str:
    """The one error of all ranks."""
    assert len({str(error) for error in found[0]}) == 1
    return str(found[0][0])


def test_two_processes_on_one_device_are_an_error_on_every_rank() -> None:
    assert "same device cuda:0" in alike(together(["cuda:0"] * 4, ["a", "b", "a", "d"]))
    # A device without a uuid has the name of its index.
    assert "same device cuda:1" in alike(together(["cuda:0", "cuda:1", "cuda:1"], [None] * 3))


def test_devices_that_cannot_be_told_apart_are_a_remark() -> None:
    errors, remarks = together(["cuda:0"] * 3, [None] * 3, visible=1)
    assert errors == [None] * 3 and len(remarks) == 1 and "whether they are two accelerators is not known" in remarks[0]


def test_devices_of_two_kinds_are_an_error_on_every_rank() -> None:
    assert "has the device" in alike(together(["cuda:0", "cuda:1", "cpu"], ["a", "b", "c"]))


def test_a_rank_without_a_device_is_an_error_on_every_rank() -> None:
    """Ranks of other hosts do not wait for a host that has too few devices."""
    few = sw.SettingError("8 processes run on the host b, which shows 4 accelerators", legal="4 processes")
    text = alike(together(["cuda:0", few, "cuda:2"], ["a", "b", "c"]))
    assert "which shows 4 accelerators (on rank 1)" in text and "4 processes" in text


def one_of_two_hosts(rank: int, port: int, sender: Any) -> None:
    """A rank of two hosts, of which the second shows too few accelerators."""
    with pytest.MonkeyPatch.context() as patch:
        Host(patch, 2 if rank else 8)
        patch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace())
        run = RankInRun("Slurm", rank, 2, 0, 8, "127.0.0.1", port)
        patch.setattr(process, "find", lambda environment: run)
        try:
            sw.init(timeout=2 * PATIENCE)
        except sw.SettingError as error:
            sender.send(str(error))


def test_a_host_with_too_few_devices_is_an_error_on_the_other_hosts_too() -> None:
    context = multiprocessing.get_context("fork")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [context.Process(target=one_of_two_hosts, args=(r, port, pipes[r][1])) for r in range(2)]
    for process_ in ranks:
        process_.start()
    try:
        assert all(receiver.poll(PATIENCE) for receiver, _ in pipes), "an error, not a wait for the timeout"
        text = [receiver.recv() for receiver, _ in pipes]
    finally:
        for process_ in ranks:
            process_.kill()
            process_.join()
    assert text[0] == text[1] and "which shows 2 accelerators (on rank 1)" in text[0]


def on_one_device(rank: int, world: int) -> str:
    """A rank of the user's own NCCL group that has set no device."""
    with pytest.MonkeyPatch.context() as patch:
        Host(patch, 8)
        patch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace())
        patch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
        patch.setattr(process, "_place_in_group", lambda: None)
        patch.setattr(process, "_note_interface", lambda address, backends: None)
        model = sw.AutoParallel(nn.Linear(4, 4), nn.MSELoss(), parallel_mode="data_parallel")
        with pytest.raises(sw.SettingError) as raised:
            model(torch.zeros(4, 4), torch.zeros(4, 4))
    return str(raised.value)


def test_two_ranks_of_a_users_group_on_one_device_are_an_error_on_every_rank() -> None:
    text = run_ranks(on_one_device, 2)
    assert text[0] == text[1] and "have the same device cuda:0" in text[0] and "set_device_index" in text[0]


def on_two_devices(rank: int, world: int) -> str:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net.register_buffer("scale", torch.empty(4))
    with pytest.MonkeyPatch.context() as patch:
        held = SimpleNamespace(device=torch.device("cuda", rank))
        real = net.named_buffers
        patch.setattr(net, "named_buffers", lambda *args, **kwargs: [("scale", held)])
        model = sw.AutoParallel(net, nn.MSELoss(), parallel_mode="data_parallel")
        with pytest.raises(sw.ShardwrightError) as raised:
            model(torch.zeros(4, 4), torch.zeros(4, 4))
        net.named_buffers = real
    return str(raised.value)


def test_a_model_on_two_devices_is_an_error_on_every_rank() -> None:
    text = run_ranks(on_two_devices, 2)
    assert all("the model is on several devices: 0.weight is on cpu, scale on cuda" in each for each in text)


@pytest.mark.parametrize("backends, named", [("cuda:nccl", "eth7"), ("cpu:gloo,cuda:nccl", None)])
def test_the_interface_of_a_users_group_is_named_to_gloo(monkeypatch, backends: str, named: str | None) -> None:
    """A Gloo group of checkpoints is made beside it."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    store = dist.PrefixStore("a", dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    monkeypatch.setattr(process, "default_store", lambda: store)
    monkeypatch.setattr(process, "leading_to", lambda address, port: "eth7" if address == "127.0.0.1" else None)
    process._note_interface(process._address_of_group(), backends)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == named
    monkeypatch.setattr(process, "default_store", dist.HashStore)  # an address of the environment
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    monkeypatch.setenv("MASTER_PORT", "4321")
    assert process._address_of_group() == ("10.0.0.7", 4321)


@pytest.mark.parametrize("backend", ["nccl", "hccl", "gloo"])
def test_the_gloo_group_of_checkpoints_has_the_interface_of_the_run(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Under any backend: the name of a host often leads to 127.0.1.1."""

    class Reached(Exception):
        pass

    def reached(*given: Any) -> None:
        raise Reached

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # taken back at the end
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(process, "leading_to", lambda address, port: "eth7")
    monkeypatch.setattr(process, "token_of", reached)
    with pytest.raises(Reached):
        process._join(place(0, 2), torch.device("cpu"), backend, WAIT, WAIT)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize(
    "backend, joined, failed, destroyed",
    [("nccl", True, False, 1), ("gloo", True, False, 0), ("nccl", False, False, 0), ("nccl", True, True, 0)],
)
def test_the_group_is_destroyed_at_the_end(
    monkeypatch: pytest.MonkeyPatch, backend: str, joined: bool, failed: bool, destroyed: int
) -> None:
    """The group that `init` has joined, on a library, where no error ends the process."""
    calls: list[int] = []
    monkeypatch.setattr(process, "_joined", [lambda: dist.group.WORLD] if joined else [])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(1))
    monkeypatch.setattr(sys, "last_value", ValueError() if failed else None, raising=False)
    process._leave()
    assert len(calls) == destroyed
