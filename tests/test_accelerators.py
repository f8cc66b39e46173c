"""Accelerators by their module of torch: with a module of our own in place of a vendor's."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_networks import draw
from torch import nn

import shardwright as sw
from shardwright import accelerators
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
from shardwright.runtime import calibrate
from shardwright.runtime.deferred_init import beginnings
from shardwright.verification import node_comparison

PACKAGE = Path(__file__).parents[1] / "shardwright"
NPU = torch.device("npu", 0) if hasattr(torch, "npu") else torch.device("xpu", 0)

#: Lines that name one vendor, and why.
NAMED = {
    "autocast.py": "the kinds of devices whose autocast lists are read",
    "launch/device_choice.py": "examples in messages",
    "cli/doctor_command.py": "the vendor for which torch is built",
    "cli/measuring_commands.py": "examples in messages",
    "rehearsal/rehearse.py": "torch's own default of fork_rng",
    "runtime/compilation.py": "torch's own names of inductor's modes",
    "rules/random_numbers/dropout.py": "the kinds of devices whose kernels multiply in float32",
    "rules/random_numbers/dropout_kernel.py": "the kinds of devices for which Triton compiles",
    "process_runtime.py": "the name of each vendor's library of collectives, and examples",
    "capture/watched_calls.py": "the functions of each kind of device that seed",
    "torch_private/capture_internals.py": "cuDNN is NVIDIA's own",
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
    before = sw.process_runtime.stream.calls
    module.capturing = True
    with pytest.raises(sw.SettingError, match=r"records a graph.*\n.*eval\(\)"):
        model(torch.ones(4, 4))
    assert sw.process_runtime.stream.calls == before
    model.eval()(torch.ones(4, 4))
    module.capturing = False
    model.train()(torch.ones(4, 4))
    assert sw.process_runtime.stream.calls == before + 1


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
    vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)
