"""Training steps on a fake accelerator: a mix of devices raises anywhere between the capture and the optimizer.

The cases run in a process of their own (`support/fake_accelerator.py`), because the fake device is known to all of it.
"""

from __future__ import annotations

import pytest
import torch
from fake_accelerator_lines import lines_of
from torch import nn

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.capture.model_device import check_inputs, device_of

CASES = [
    *("gpt late, inputs on cpu, full_batch", "gpt late, inputs on device, data_parallel"),
    *("gpt cpu, inputs on device, full_batch", "gpt cpu, inputs on cpu, data_parallel"),
    *("gpt moved, inputs on cpu, full_batch", "gpt moved, inputs on device, data_parallel"),
    *(
        f"made inside, {built}, inputs on {inputs}, {dataset}"
        for built in ("late", "cpu", "moved")
        for inputs in ("cpu", "device")
        for dataset in ("full_batch", "data_parallel", "tuples")
    ),
    *("tuples", "images", "hsdp level1", "hsdp level2", "hsdp level3"),
    *("dropout exact, without copies", "dropout exact, without copies, data_parallel"),
    *("dropout exact", "dropout fast", "recompute", "autocast", "foreach"),
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict]:
    """Case -> its line."""
    return lines_of("fake_accelerator.py")


@pytest.mark.parametrize("name", CASES)
def test_two_steps_run_on_the_device(outcomes: dict[str, dict], name: str) -> None:
    assert outcomes[name] == {"loss": "npu:0", "parameters": ["npu:0"]}


def test_every_case_of_the_script_is_looked_at(outcomes: dict[str, dict]) -> None:
    assert set(outcomes) == set(CASES)


class Positions(nn.Module):
    """Adds positions that are made where the input is."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + torch.arange(4, device=x.device))


@pytest.mark.parametrize("inputs", ["cpu", "meta"])
def test_a_capture_is_for_the_device_that_it_is_given(inputs: str) -> None:
    """Constructors inside the forward are captured for it, whatever the inputs are on."""
    graph = capture(Positions(), (torch.empty(2, 4, device=inputs),), device="cpu")
    (made,) = [op for op in graph.ops if "arange" in op.kind]
    assert made.kwargs["device"] == torch.device("cpu")


def test_the_device_of_a_model() -> None:
    with sw.no_init_parameters():
        late = nn.Linear(4, 4)
    assert device_of(nn.Linear(4, 4)) == torch.device("cpu")
    assert device_of(late) == torch.get_default_device()
    assert device_of(late, None, (torch.zeros(2),)) == torch.device("cpu")
    with torch.device("meta"):  # where nothing has values, a plan is made for the CPU
        assert device_of(nn.ReLU(), None, (torch.zeros(2),)) == torch.device("cpu")


class Elsewhere(nn.Module):
    """A parameter that says that it is on another device."""

    def named_parameters(self, *_, **__):
        yield "weight", _On("cuda:0")
        yield "bias", _On("cpu")


class _On:
    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def test_a_model_on_two_devices_is_an_error_with_two_names() -> None:
    with pytest.raises(sw.SettingError, match="weight is on cuda:0, bias on cpu") as raised:
        device_of(Elsewhere())
    assert 'model.to("cuda:0")' in raised.value.legal


def test_inputs_on_another_device_are_an_error_in_one_process() -> None:
    check_inputs(torch.device("cuda", 0), (torch.zeros(()), torch.zeros(2, device="meta")))  # a number, and no values
    with pytest.raises(sw.SettingError, match="input 1 is on cpu, the model on cuda:0"):
        check_inputs(torch.device("cuda", 0), (torch.zeros(()), torch.zeros(2)))
