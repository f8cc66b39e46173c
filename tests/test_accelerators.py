"""Accelerators by their module of torch, with a module of our own in place of a vendor's; and the device of a process,
on hosts whose accelerators are not there: the test answers the questions to torch.
"""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import tokenize
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_networks import draw
from torch import nn

import shardwright as sw
from shardwright import accelerators, process
from shardwright.accelerators import (
    default_device,
    host_memory,
    module_of,
    moved,
    on_host_soon,
    random_state,
    sum_type,
    total_memory,
)
from shardwright.checkpoint import stored_checkpoint
from shardwright.checkpoint.run_state import generators, restore_generators
from shardwright.launch.environment import RankInRun
from shardwright.runtime.deferred_init import beginnings
from shardwright.runtime.distributed import calibrate
from shardwright.verification import node_comparison

PACKAGE = Path(__file__).parents[1] / "shardwright"
NPU = torch.device("npu", 0) if hasattr(torch, "npu") else torch.device("xpu", 0)

#: Lines that name one vendor, and why.
NAMED = {
    "autocast.py": "the kinds of devices whose autocast lists are read",
    "cli/doctor_command.py": "the vendor for which torch is built",
    "cli/measuring_commands.py": "examples in messages",
    "rehearsal/rehearse.py": "torch's own default of fork_rng",
    "runtime/compilation.py": "torch's own names of inductor's modes",
    "rules/dropout_kernel.py": "the kinds of devices for which Triton compiles",
    "process.py": "the name of each vendor's library of collectives, and examples",
    "torch_private.py": "cuDNN is NVIDIA's own",
    "accelerators.py": "hardware that adds float64; examples in messages",
}


class Module(SimpleNamespace):
    """The module of an accelerator with 64 GB, whose state is four bytes."""

    def __init__(self, **given: Any) -> None:
        super().__init__(
            is_initialized=lambda: True,
            get_rng_state=lambda *device: self.state,
            set_rng_state=self._set,
            is_current_stream_capturing=lambda: self.capturing,
            mem_get_info=lambda device: (1, 64 << 30),
            state=torch.tensor([1, 2, 3, 4], dtype=torch.uint8),
            capturing=False,
            **given,
        )

    def _set(self, state: torch.Tensor) -> None:
        self.state = state


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    made = Module()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *given, **named: NPU)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: made)
    return made


def strings(path: Path) -> list[str]:
    """The texts of a file's code, docstrings and comments left out."""
    found, begins = [], True
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME or (token.type == tokenize.STRING and not begins):
            found.append(token.string)
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            begins = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    return found


def test_no_code_names_a_vendor() -> None:
    named = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(re.search(r"cuda|\bnpu\b", text) for text in strings(path))
    }
    assert not named - set(NAMED)


def test_a_cpu_has_no_module() -> None:
    cpu = torch.device("cpu")
    assert module_of(cpu) is None and accelerators.event(cpu) is None and accelerators.side_stream(cpu) is None
    assert not host_memory(torch.ones(2)).is_pinned() and torch.equal(random_state(cpu), torch.get_rng_state())
    x = torch.ones(2)
    assert on_host_soon(x) == (x, None) and sum_type(cpu) == torch.float64


def test_memory_of_an_accelerator(module: Module) -> None:
    assert total_memory(NPU) == calibrate._memory(NPU, 8) == 64 << 30
    del module.mem_get_info
    module.get_device_properties = lambda device: SimpleNamespace(total_memory=32 << 30)
    assert total_memory(NPU) == 32 << 30
    del module.get_device_properties
    with pytest.raises(sw.SettingError, match="does not tell how much memory"):
        total_memory(NPU)  # never the host's


def test_random_states_of_any_accelerator_are_saved(module: Module) -> None:
    saved = generators()
    assert saved[NPU.type] == bytes([1, 2, 3, 4])
    module.state = torch.zeros(4, dtype=torch.uint8)
    restore_generators(saved)
    assert module.state.tolist() == [1, 2, 3, 4]
    restore_generators({name: state for name, state in saved.items() if name != NPU.type} | {"other": b"1"})
    module.is_initialized = lambda: False
    assert NPU.type not in generators()


def test_a_graph_of_random_numbers_is_refused(module: Module) -> None:
    """Before the call is counted, or anything is computed."""
    sw.init(devices=2)
    model = sw.AutoParallel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), parallel_mode="data_parallel")
    model(torch.ones(4, 4))
    before = sw.process.stream.calls
    module.capturing = True
    with pytest.raises(sw.SettingError, match=r"records a graph.*\n.*eval\(\)"):
        model(torch.ones(4, 4))
    assert sw.process.stream.calls == before
    model.eval()(torch.ones(4, 4))
    module.capturing = False
    model.train()(torch.ones(4, 4))
    assert sw.process.stream.calls == before + 1


def test_the_beginnings_are_summed_in_what_the_device_has() -> None:
    """Without a copy of the values in another type: the largest parameter would need four times its memory."""
    net = nn.Linear(3, 4, dtype=torch.bfloat16)
    net.z = nn.Parameter(torch.full((2,), 1 + 2j))
    found = beginnings(net)
    assert found["weight"] == net.weight.double().sum().item() and found["z"] == 6.0
    assert sum_type(torch.device("cuda")) == torch.float64 and sum_type(torch.device("mps")) == torch.float32
    assert calibrate._Watch(torch.device("cpu"), 3).device.type == "cpu" and draw(1).dtype == torch.float64


def test_inputs_and_files_come_through_pinned_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: True)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, **named: asked.append((device.type, named)))
    x, meta = torch.ones(2), torch.device("meta")
    assert moved(x, torch.device("cpu")) is x and not asked
    moved(x, meta)
    assert asked == [("meta", {"non_blocking": True})]
    monkeypatch.undo()

    net = nn.Linear(3, 4)
    sw.save_checkpoint(net, path=tmp_path, step=0)
    plain, copied = stored_checkpoint.host_memory, []
    monkeypatch.setattr(
        stored_checkpoint,
        "host_memory",
        lambda like, dtype: (copied.append((like.dtype, dtype)), plain(like, dtype))[1],
    )
    out = torch.empty(4, 3, dtype=torch.float64)  # not as it is stored, as on a device
    with stored_checkpoint.StoredTensors(sw.latest_checkpoint(tmp_path)) as stored:
        stored.read_into(out, "model.weight")
    assert torch.equal(out, net.weight.double()) and copied == [(torch.float64, torch.float32)]


def test_a_comparison_is_in_float64_where_there_is_such(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    assert node_comparison.difference(a, b) == 0.2
    monkeypatch.setattr(node_comparison, "sum_type", lambda device: torch.float32)
    moves: list[str] = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: (moves.append("to the host"), x)[1])
    assert node_comparison.difference(a, b) == 0.2 and moves


def test_the_default_device_may_be_set_and_taken_back() -> None:
    assert default_device() == torch.device("cpu")
    with torch.device("meta"):
        assert default_device() == torch.device("meta")
    torch.set_default_device("meta")
    torch.set_default_device(None)
    assert default_device() == torch.device("cpu"), "torch 2.9's own function raises here"


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
    assert str(accelerators.device_of_rank(place(rank, devices), **given)) == wanted
    assert host.index == (int(wanted.partition(":")[2]) if wanted != "cpu" else 0)


@pytest.mark.parametrize("count, devices", [(4, 8), (2, 3), (7, 8)])
def test_fewer_accelerators_than_processes_are_an_error_on_every_rank(monkeypatch, count: int, devices: int) -> None:
    Host(monkeypatch, count)
    for rank in range(devices):
        with pytest.raises(sw.SettingError, match=f"{devices} processes run on the host .* {count} acc") as raised:
            accelerators.device_of_rank(place(rank, devices))
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
    assert str(process.device_of_group(place(3, 8) if agrees else None, given)) == wanted


@pytest.mark.parametrize("wrong", ["cuda", "cuda:0", "gpu", "meta", 1.5])
def test_a_device_that_is_not_there(wrong: Any) -> None:
    with pytest.raises(sw.SettingError, match="device") as raised:
        sw.init(device=wrong)
    assert "cpu" in raised.value.legal


def test_the_device_of_the_local_runtime(monkeypatch) -> None:
    Host(monkeypatch, 2)
    assert str(accelerators.asked_device("cuda:1")) == "cuda:1" and accelerators.asked_device(None) is None
    with pytest.raises(sw.SettingError, match="no such device") as raised:
        accelerators.asked_device("cuda:2")
    assert raised.value.legal == "cpu, cuda:0, cuda:1"


def together(devices: list[str], uuids: list[str], store: dist.Store | None = None) -> list[Exception | None]:
    """The outcome of `check_shared` on each rank."""
    store, out = store or dist.HashStore(), [None] * len(devices)
    ranks = {threading.get_ident(): 0}

    def run(rank: int) -> None:
        ranks[threading.get_ident()] = rank
        try:
            process.check_shared(torch.device(devices[rank]), place(rank, len(devices)), store, WAIT)
        except sw.SettingError as error:
            out[rank] = error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_identity", lambda device: uuids[ranks[threading.get_ident()]])
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
