"""Loading in one process: going on to the bit, under other plans, without a plan, from Hugging Face; and what is
refused."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoint_runs import CROSS_ENTROPY, PLANS, Net, adamw, alike, sgd, train
from small_networks import D
from torch import nn
from torch.optim import lr_scheduler

import shardwright as sw
from shardwright.checkpoint import manifest
from shardwright.errors import CheckpointError

os.environ.setdefault("HF_HUB_OFFLINE", "1")
KINDS = pytest.mark.parametrize("whole", [True, False], ids=["integrated", "parts"])


def made(name: str = "rows and columns", devices: int = 4, seed: int = 5) -> sw.AutoParallel:
    sw.init(devices=devices)
    model = PLANS[name](devices)
    torch.manual_seed(seed)
    return model


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        copy.deepcopy(model.state_dict()),
        copy.deepcopy(optimizer.state_dict()),
        torch.get_rng_state(),
        random.getstate(),
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    return len(one) == len(other) and all(map(same, one, other)) if isinstance(one, (list, tuple)) else one == other


# -- going on ----------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": sgd,
    "AdamW, fused": lambda m: adamw(m, fused=True),
    "AdamW, one by one": lambda m: adamw(m, foreach=False, amsgrad=True),
    "two groups": lambda m: torch.optim.Adam(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in m.parameters() if p.dim() < 2], "lr": 0.02},
        ],
        0.01,
    ),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.1),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), 0.1),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.01, centered=True),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), 0.01),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), 0.01),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10, cycle_momentum=False),
    "warm, then cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
    ),
    "by a function": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
}


@pytest.mark.parametrize("number", range(len(OPTIMIZERS)), ids=list(OPTIMIZERS))
def test_training_goes_on_to_the_bit(tmp_path: Path, number: int) -> None:
    make = list(OPTIMIZERS.values())[number]
    scheduled = list(SCHEDULERS.values())[number % len(SCHEDULERS)]
    model = made("data_parallel", 2)
    optimizer = make(model)
    scheduler = scheduled(optimizer)
    train(model, optimizer, 0, 2, scheduler)
    random.seed(1), np.random.seed(1)
    sw.save_checkpoint(model, optimizer, tmp_path, step=2, schedulers=scheduler, integrated_save=number % 2 == 0)
    numbers = random.random(), np.random.rand()
    losses = train(model, optimizer, 2, 5, scheduler)
    after = model.state_dict()
    for called in (False, True):
        model = made("data_parallel", 2, seed=77)
        optimizer = make(model)
        scheduler = scheduled(optimizer)
        if called:
            train(model, optimizer, 9, 10, scheduler)
        restored = sw.load_checkpoint(model, optimizer, tmp_path, schedulers=[scheduler])
        assert restored == sw.Restored(2, None, tmp_path / "step-00000002")
        assert (random.random(), np.random.rand()) == numbers
        assert train(model, optimizer, 2, 5, scheduler) == losses
        assert same(dict(model.state_dict()), dict(after))


def test_state_that_is_there_keeps_its_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    train(net, optimizer, 0, 2)
    sw.save_checkpoint(net, optimizer, tmp_path, step=2)
    held = {p: dict(optimizer.state[p]) for p in net.parameters()}
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    train(net, optimizer, 2, 3)
    fits, wide, cut, *_ = net.parameters()
    optimizer.state[wide]["exp_avg"] = optimizer.state[wide]["exp_avg"].float()
    optimizer.state[cut]["exp_avg"] = torch.zeros(*cut.shape, 2, dtype=D)[..., 0]
    del optimizer.state[fits]["exp_avg_sq"]
    versions = {p: state["exp_avg"]._version for p, state in optimizer.state.items()}
    sw.load_checkpoint(net, optimizer, tmp_path)
    assert same(optimizer.state_dict()["state"], expected)
    for p, state in optimizer.state.items():
        assert (state["exp_avg"] is held[p]["exp_avg"]) == (p is not wide and p is not cut)
        assert (state["exp_avg_sq"] is held[p]["exp_avg_sq"]) == (p is not fits)
        assert state["exp_avg"].dtype == D and state["exp_avg"].is_contiguous()
        assert p is wide or p is cut or state["exp_avg"]._version > versions[p], "autograd is told"


def test_under_other_plans_and_without_one(tmp_path: Path) -> None:
    plain = Net()
    optimizer = sgd(plain)
    for name in ("level3", "two stages"):
        model = made(name)
        optimizer = sgd(model)
        train(model, optimizer, 0, 2)
        path = sw.save_checkpoint(model, optimizer, tmp_path / name, step=2, integrated_save=name == "level3").wait()
        losses = train(model, optimizer, 2, 4)
        for other, devices in (("columns", 8), ("as many stages", 4), ("data_parallel", 2), ("level1", 2)):
            model = made(other, devices, seed=99)
            optimizer = sgd(model)
            sw.load_checkpoint(model, optimizer, path)
            alike(train(model, optimizer, 2, 4), losses)
    # On one device without a wrapper: what dropout draws is torch's own there, so that it is left out.
    model.eval()
    sw.save_checkpoint(model, optimizer, tmp_path / "plain", step=4)
    plain = Net().eval()
    momentum = sgd(plain)
    sw.load_checkpoint(plain, momentum, tmp_path / "plain")
    alike(train(plain, momentum, 4, 6), train(model, optimizer, 4, 6))
    sw.save_checkpoint(plain, momentum, tmp_path / "back", step=6, integrated_save=False)
    model = made("level2")
    optimizer = sgd(model)
    sw.load_checkpoint(model.eval(), optimizer, tmp_path / "back")
    alike(train(model, optimizer, 6, 8), train(plain, momentum, 6, 8))


def test_into_parameters_that_are_not_there_yet(tmp_path: Path) -> None:
    model = made()
    optimizer = sgd(model)
    train(model, optimizer, 0, 2)
    sw.save_checkpoint(model, optimizer, tmp_path, step=2)
    losses = train(model, optimizer, 2, 4)
    with sw.no_init_parameters():
        net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(2)])
    with pytest.raises(CheckpointError, match="has no memory to load into"):
        sw.load_checkpoint(net, path=tmp_path)
    sw.init(devices=4)
    with sw.no_init_parameters():
        later = Later()
        optimizer = sgd(later)
    model = sw.AutoParallel(later, CROSS_ENTROPY).dataset_strategy("full_batch")
    sw.load_checkpoint(model, optimizer, tmp_path)
    with pytest.raises(CheckpointError, match="no values yet|waits for its first call"):
        sw.save_checkpoint(model, optimizer, tmp_path, step=3)
    alike(train(model, optimizer, 2, 4), losses)
    sw.save_checkpoint(model, optimizer, tmp_path, step=4)


class Later(nn.Module):
    """A `Net` with weights that random numbers fill."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, dtype=D) for _ in range(4))
        self.head = nn.Linear(16, 8, dtype=D)
        self.norm = nn.Identity()

    forward = Net.forward


def test_positions_and_modules_with_a_state_of_their_own(tmp_path: Path) -> None:
    class Own(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.seen: Any = {}

        def get_extra_state(self) -> Any:
            return self.seen

        def set_extra_state(self, state: Any) -> None:
            self.seen = state

    class Position:
        def __init__(self) -> None:
            self.at = (0, [])

        def state_dict(self) -> Any:
            return {"at": self.at}

        def load_state_dict(self, state: Any) -> None:
            self.at = state["at"]

    net, position = nn.Sequential(Own(), Own()), Position()
    net[1].seen, position.at = {"max": torch.tensor(3.0), 4: (1,)}, (7, ["a"])
    sw.save_checkpoint(net, path=tmp_path, step=1, data=position)
    other, there = nn.Sequential(Own(), Own()), Position()
    sw.load_checkpoint(other, path=tmp_path, data=there)
    assert other[1].seen == {"max": torch.tensor(3.0), 4: (1,)} and there.at == (7, ["a"])


# -- Hugging Face ------------------------------------------------------------------------------------------------------


def test_hugging_face_folders(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def gpt2() -> nn.Module:
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=4)
        )

    tokens = torch.randint(0, 64, (4, 8))
    theirs = gpt2().eval()
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    expected = theirs(input_ids=tokens).logits
    for folder in ("one", "shards"):
        sw.init(devices=4)
        net = gpt2()
        model = sw.AutoParallel(net, parallel_mode="data_parallel").eval()
        assert sw.load_checkpoint(model, path=tmp_path / folder) == sw.Restored(None, None, tmp_path / folder)
        assert net.lm_head.weight is net.transformer.wte.weight
        torch.testing.assert_close(model(input_ids=tokens).logits, expected)
    # And back: what we save they read, tied weights and all.
    path = sw.save_checkpoint(model, path=tmp_path / "run", step=1).wait()
    again = transformers.GPT2LMHeadModel.from_pretrained(path).eval()
    assert same(dict(again.state_dict()), dict(theirs.state_dict()))
    assert manifest.verify(path) == []


def test_folders_like_hugging_faces_that_are_damaged(tmp_path: Path) -> None:
    net, folder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tmp_path / "hf"
    folder.mkdir()
    state = {n: t.clone() for n, t in net.state_dict().items()}
    safetensors.torch.save_file(dict(list(state.items())[:2]), folder / "a.safetensors")
    safetensors.torch.save_file(dict(list(state.items())[2:]), folder / "b.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {n: ("a" if i < 2 else "b") + ".safetensors" for i, n in enumerate(state)}})
    )
    nn.init.zeros_(net[0].weight)
    sw.load_checkpoint(net, path=folder)
    assert torch.equal(net[0].weight, state["0.weight"])

    def refused(what: str) -> None:
        before = copy.deepcopy(net.state_dict())
        with pytest.raises(CheckpointError, match=what):
            sw.load_checkpoint(net, path=folder)
        assert same(dict(net.state_dict()), dict(before))

    whole = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(whole[:-1])
    refused("b.safetensors: it has .* bytes instead of .*: cut short")
    (folder / "b.safetensors").write_bytes(b"\xff" * 100)
    refused("b.safetensors: its header is said to have")
    (folder / "b.safetensors").unlink()
    refused("b.safetensors: its header cannot be read: No such file")
    safetensors.torch.save_file({"1.weight": state["1.weight"]}, folder / "b.safetensors")
    refused("b.safetensors: '1.bias' is not in it")
    index.write_text("[]")
    refused("index.json: the index is a list, and no object")
    index.unlink()
    refused("hf: there is no checkpoint in it\n.*model.safetensors")
    safetensors.torch.save_file(state | {"more": torch.zeros(1)}, folder / "model.safetensors")
    sw.load_checkpoint(net, path=folder)  # a task's head that this model does not have
    safetensors.torch.save_file({k: v for k, v in state.items() if k != "0.bias"}, folder / "model.safetensors")
    refused("another model: it has no '0.bias'")
    sw.load_checkpoint(net, path=folder, strict=False)


# -- what is refused ---------------------------------------------------------------------------------------------------


@KINDS
def test_another_model_or_optimizer_is_refused_before_anything_changes(tmp_path: Path, whole: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    sw.save_checkpoint(net, optimizer, tmp_path, step=10, integrated_save=whole, schedulers=scheduler)

    def refused(what: str, model: nn.Module, **given: Any) -> None:
        held = given.pop("optimizer", None) or torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
        before = state_of(model, held)
        with pytest.raises(CheckpointError, match=what) as caught:
            sw.load_checkpoint(
                model, held if given.pop("with_optimizer", True) else None, given.pop("path", tmp_path), **given
            )
        assert str(tmp_path) in str(caught.value) and same(before, state_of(model, held))

    def layers(*sizes: int) -> nn.Module:
        return nn.Sequential(*[nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])])

    refused(r"another model: it has no '2.weight', '2.bias'\n.*strict=False", layers(4, 6, 2, 2))
    refused(r"another model: it has '1.weight', '1.bias', which the model does not", layers(4, 6))
    refused(r"another model: its '1.weight' is of shape \(2, 6\), the model's is \(3, 6\)", layers(4, 6, 3))
    refused(r"its '0.weight' is float32, the model's is float64\n.*strict=False", layers(4, 6, 2).double())
    refused(r"it has no '0.first'", nn.Sequential(nn.ParameterDict({"first": nn.Parameter(torch.zeros(1))})))
    other = layers(4, 6, 2)
    refused(
        r"the state of SGD \(momentum_buffer\), and the optimizer is Adam\n",
        other,
        optimizer=torch.optim.Adam(other.parameters()),
    )
    refused(
        r"1 groups of \[4\] parameters, this one 1 of \[2\]; group 0 differs in model.1",
        other,
        optimizer=torch.optim.SGD(other[0].parameters(), 0.1),
    )
    refused(
        r"1 groups of \[4\] parameters, this one 2",
        other,
        optimizer=torch.optim.SGD([{"params": other[0].parameters()}, {"params": other[1].parameters()}], 0.1),
    )
    refused(
        r"the schedulers \['StepLR'\], and \['ConstantLR'\]",
        other,
        schedulers=[lr_scheduler.ConstantLR(torch.optim.SGD(other.parameters(), 0.1))],
    )
    refused("no position in the data", other, data=object())
    refused(r"no checkpoint of step 3\n.*the steps there are: 10", other, step=3)
    refused(r"step='x'", other, step="x")
    refused("there is no such folder", other, path=tmp_path / "none")
    refused("there is no checkpoint of step 7", other, path=tmp_path / "none", step=7)
    refused("no checkpoint of step 7\n.*a checkpoint itself", other, path=tmp_path / "step-00000010", step=7)
    sw.load_checkpoint(layers(4, 6, 2).double(), path=tmp_path, strict=False)
    part = layers(4, 6)
    sw.load_checkpoint(part, path=tmp_path, strict=False)
    assert torch.equal(part[0].weight, net[0].weight)
    sw.save_checkpoint(net, path=tmp_path / "bare", step=1)
    sw.save_checkpoint(net, path=tmp_path / "runs" / "7", step=1)
    refused("it has no state of an optimizer, and the SGD is to have one", other, path=tmp_path / "bare")
    assert sw.load_checkpoint(net, path=tmp_path / "none", missing_ok=True) is None
    refused(r"no checkpoint in it; .*runs.7 has one\n", other, path=tmp_path / "runs")
    with pytest.warns(
        RuntimeWarning, match=r"nothing is loaded, as missing_ok=True asks\n.*the folder of the run, .*runs.7"
    ):
        assert sw.load_checkpoint(net, path=tmp_path / "runs", missing_ok=True) is None
    with pytest.raises(CheckpointError, match=r"path=None\n.*load_checkpoint\(model, optimizer, path\)"):
        sw.load_checkpoint(net, tmp_path)


def test_steps(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    for step in (3, 20, 100_000_000):
        sw.save_checkpoint(net, path=tmp_path, step=step, extra=step)
    assert sw.load_checkpoint(net, path=tmp_path).extra == 100_000_000
    assert sw.load_checkpoint(net, path=tmp_path, step=20).extra == 20
    assert sw.load_checkpoint(net, path=tmp_path / "step-00000003").extra == 3
    (tmp_path / "step-00000020").rename(tmp_path / "best")
    assert sw.load_checkpoint(net, path=str(tmp_path / "best")).step == 20
    (tmp_path / "step-00000003").rename(tmp_path / "step-00000004")
    with pytest.raises(CheckpointError, match="it is of step 3"):
        sw.load_checkpoint(net, path=tmp_path, step=4)
