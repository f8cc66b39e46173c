"""The device of a process, on hosts whose accelerators are not there: the test answers the questions to torch."""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright import process
from shardwright.launch import device_choice
from shardwright.launch.environment import RankInRun

WAIT = timedelta(seconds=20)


class Host:
    """A host with so many accelerators; `index` is the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.index = 0
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda") if count else None)
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


def together(devices: list[str], uuids: list[str], store: dist.Store | None = None) -> list[Exception | None]:
    """The outcome of `check_shared` on each rank."""
    store, out = store or dist.HashStore(), [None] * len(devices)
    ranks = {threading.get_ident(): 0}

    def run(rank: int) -> None:
        ranks[threading.get_ident()] = rank
        try:
            device_choice.check_shared(torch.device(devices[rank]), place(rank, len(devices)), store, WAIT)
        except sw.SettingError as error:
            out[rank] = error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_choice, "_identity", lambda device: uuids[ranks[threading.get_ident()]])
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(devices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return out


def test_each_rank_with_a_device_of_its_own() -> None:
    store = dist.HashStore()
    for _ in range(3):  # workers that are started anew meet in the same store
        assert together(["cuda:0"] * 4, ["a", "b", "c", "d"], store) == [None] * 4
    assert together(["cpu"] * 3, ["x"] * 3) == [None] * 3


def test_two_processes_on_one_device_are_an_error_on_every_rank() -> None:
    found = together(["cuda:0"] * 4, ["a", "b", "a", "d"])
    assert len({str(error) for error in found}) == 1 and "same device cuda:0" in str(found[0])


def test_devices_of_two_kinds_are_an_error_on_every_rank() -> None:
    found = together(["cuda:0", "cuda:1", "cpu"], ["a", "b", "c"])
    assert len({str(error) for error in found}) == 1 and "has the device" in str(found[0])


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
