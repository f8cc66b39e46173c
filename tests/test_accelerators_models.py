"""Models, modes and pipelines on a fake accelerator; torch's default device; a device that is not there."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator_lines import lines_of
from ranks import run_ranks
from small_networks import draw
from torch import nn

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.checkpoint.stored_checkpoint import StoredTensors

#: Model -> where it is built, where the inputs are, and the dataset.
COMBINATIONS = {
    "operator_objects": ("late, cpu, full_batch", "cpu, device, data_parallel", "moved, cpu, tuples"),
    "operator_functional": ("late, cpu, data_parallel", "cpu, device, tuples", "moved, cpu, full_batch"),
    "layout_objects": ("late, cpu, tuples", "cpu, device, full_batch", "moved, cpu, data_parallel"),
    "layout_functional": ("late, device, full_batch", "cpu, cpu, data_parallel", "moved, device, tuples"),
    "llama": ("late, device, data_parallel", "cpu, cpu, tuples", "moved, device, full_batch"),
    "resnet": ("late, device, tuples", "cpu, cpu, full_batch", "moved, device, data_parallel"),
    "README": (
        *("late, cpu, full_batch", "late, device, data_parallel", "late, cpu, tuples"),
        *("cpu, device, full_batch", "cpu, cpu, data_parallel", "cpu, device, tuples"),
        *("moved, cpu, full_batch", "moved, device, data_parallel", "moved, cpu, tuples"),
    ),
}
CASES = [
    *(
        "{}, {}, inputs on {}, {}".format(model, *combination.split(", "))
        for model, several in COMBINATIONS.items()
        for combination in several
    ),
    *("resnet, batch norms of the whole batch", "resnet50 of torchvision"),
    *(f"attention with fast dropout, {built}" for built in ("late", "cpu")),
    *("sharding_propagation", "recursive_programming", "dynamic_programming"),
    *(
        f"{scheduler}, {how}"
        for scheduler in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
        for how in ("2 stages, late", "4 stages, cpu")
    ),
    *("pipeline, parts of the batch", "blocks recomputed"),
    *("numbers without float64", "numbers without float64 and words"),
    *("compiled", "compiled, with other random numbers", "compiled, pipeline"),
    "compiled, attention with fast dropout",
    *(f"default device, {how}" for how in ("late", "built on it", "pipeline")),
    *(
        f"one process, {how}{pipeline}"
        for how in ("device of the model, moved", "device chosen, cpu", "device chosen, late")
        for pipeline in ("", ", pipeline")
    ),
    *("one process, moved after the first call", "moved after the first call"),
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    """Case -> its line."""
    return lines_of("fake_accelerator_models.py")


@pytest.mark.parametrize("name", CASES)
def test_two_steps_run_on_the_device(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    assert outcomes[name] == {"loss": "npu:0", "parameters": ["npu:0"]}


def test_every_case_of_the_script_is_looked_at(outcomes: dict[str, dict[str, Any]]) -> None:
    assert set(outcomes) == set(CASES)


def test_combinations_are_covered() -> None:
    """Each model has each choice, one model has every two choices together, and the models together have all
    combinations."""
    choices = (("late", "cpu", "moved"), ("cpu", "device"), ("full_batch", "data_parallel", "tuples"))
    chosen = {model: [tuple(text.split(", ")) for text in texts] for model, texts in COMBINATIONS.items()}
    assert {combination for found in chosen.values() for combination in found} == set(product(*choices))
    for found in chosen.values():
        assert all({combination[i] for combination in found} == set(choices[i]) for i in range(3))
    for i, j in combinations(range(3), 2):
        assert {(x[i], x[j]) for x in chosen["README"]} == set(product(choices[i], choices[j]))


# -- torch's default device --------------------------------------------------------------------------------------------


@pytest.fixture
def default_device() -> Any:
    """Set torch's default device; the test's end takes it back."""
    yield torch.set_default_device
    torch.set_default_device(None)
    vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)  # torch 2.9's own function raises without


def test_the_default_device_is_not_that_of_the_package(default_device: Any, tmp_path: Path) -> None:
    """Its own tensors have values: of the exact random numbers, of plans, of checkpoints."""
    sw.init(devices=4)
    x, seen = draw(8, 8), []
    for default in ("cpu", "meta"):
        default_device("cpu")
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).double()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        default_device(default)  # "meta": on which nothing has values
        torch.manual_seed(1)
        model = sw.AutoParallel(net, nn.MSELoss(), parallel_mode="dynamic_programming").dataset_strategy("full_batch")
        for _ in range(2):
            loss = model(x, x)
            loss.backward()
            optimizer.step()
        folder = sw.save_checkpoint(model, optimizer, tmp_path / default, step=1).wait()
        with StoredTensors(folder) as stored:
            columns = stored.read("model.0.weight", (slice(0, 8), slice(2, 4)))
        assert torch.equal(columns, net[0].weight[:, 2:4])
        saved = {name: p.detach().clone() for name, p in net.named_parameters()}
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
        sw.load_checkpoint(model, optimizer, tmp_path / default)
        assert all(torch.equal(p, saved[name]) for name, p in net.named_parameters())
        model.plan.save(tmp_path / "plan.json")
        assert str(sw.Plan.load(tmp_path / "plan.json")) == str(model.plan)
        seen.append(loss.detach())
    assert torch.equal(*seen)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_device_that_is_not_there_is_an_error_and_not_the_end_of_the_process() -> None:
    with pytest.raises(sw.SettingError, match=r"capture\(device='cuda'\): there is no such device"):
        capture(nn.Linear(4, 4), (torch.zeros(2, 4),), device="cuda")
    with pytest.raises(sw.SettingError, match=r"init\(device='cuda:3'\): there is no such device"):
        sw.init(device="cuda:3")


def test_inputs_without_values_cannot_run() -> None:
    """At the first call and at later ones."""
    sw.init(devices=2)
    model = sw.AutoParallel(nn.Linear(4, 4), nn.MSELoss(), parallel_mode="data_parallel")
    x = torch.zeros(4, 4)
    for _ in range(2):
        with pytest.raises(sw.SettingError, match="input 1 is on the meta device") as raised:
            model(x, x.to("meta"))
        assert "shardwright.plan" in raised.value.legal
        model(x, x)


def one_rank_feeds_no_values(rank: int, world: int) -> str:
    sw.init()
    model = sw.AutoParallel(nn.Linear(4, 4), nn.MSELoss(), parallel_mode="data_parallel")
    with pytest.raises(sw.ShardwrightError) as raised:
        model(torch.zeros(4, 4, device="meta" if rank else "cpu"), torch.zeros(4, 4))
    return str(raised.value)


def test_a_rank_without_values_is_an_error_on_every_rank() -> None:
    assert all("input 0 is on the meta device" in text for text in run_ranks(one_rank_feeds_no_values, 2))
