"""All checkpoints of a run transformed; the ranks whose parts another layout needs; a checkpoint loaded to predict
with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_runs import CROSS_ENTROPY, PLANS, Net, adamw, batch, train
from ranks import run_ranks
from torch import nn

import shardwright as sw
from shardwright.checkpoint import manifest
from shardwright.checkpoint.stored_checkpoint import StoredTensors
from shardwright.checkpoint.transform import transform
from shardwright.errors import CheckpointError, PlanError, SettingError
from shardwright.planfile.parameter_file import ParameterStrategies


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with whole files at step 1 and parts of four ranks at step 2."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(5)
    sw.init(devices=4)
    model = PLANS["rows and columns"](4).save_operator_strategy_file(folder / "plan.json")
    optimizer = adamw(model)
    for step in (1, 2):
        train(model, optimizer, step - 1, step)
        sw.save_checkpoint(model, optimizer, folder / "steps", step=step)
    transform(folder / "steps", folder / "parts", folder / "plan.json")
    shutil.rmtree(folder / "steps" / "step-00000002")
    (folder / "parts").rename(folder / "steps" / "step-00000002")
    return folder / "steps"


@pytest.fixture
def strategies(tmp_path: Path) -> Path:
    """The places of parameters on eight devices."""
    sw.init(devices=8)
    PLANS["columns"](8).save_param_strategy_file(tmp_path / "parameters.json").infer_layout(*batch(0))
    return tmp_path / "parameters.json"


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """The model of a checkpoint, by names in the model."""
    with StoredTensors(folder) as stored:
        return {name.removeprefix("model."): stored.read(name) for name in stored.names if name.startswith("model.")}


def emptied(net: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(7)
    return net


def untouched(net: nn.Module) -> bool:
    return all(bool((p == 7).all()) for p in net.parameters())


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_is_transformed(run: Path, strategies: Path, tmp_path: Path) -> None:
    new, back = tmp_path / "new" / "run", tmp_path / "back"
    assert sw.transform_checkpoints(run, new, strategies) == [new / "step-00000001", new / "step-00000002"]
    assert sw.latest_checkpoint(new) == new / "step-00000002"
    assert sw.transform_checkpoints(new, back) == [back / "step-00000001", back / "step-00000002"]
    for step in ("step-00000001", "step-00000002"):
        assert manifest.verify(new / step) == manifest.verify(back / step) == []
        assert (manifest.read(new / step).world, manifest.read(back / step).kind) == (8, "integrated")
        before = whole(run / step)
        for made in (new, back):
            assert all(torch.equal(before[name], tensor) for name, tensor in whole(made / step).items())
    one = sw.transform_checkpoints(run / "step-00000001", tmp_path / "one", strategies)
    assert one == [tmp_path / "one" / "step-00000001"]
    model = PLANS["columns"](8)
    assert sw.load_checkpoint(model, adamw(model), new).step == 2


def test_what_cannot_be_transformed(run: Path, strategies: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    with pytest.raises(CheckpointError, match="no such folder"):
        sw.transform_checkpoints(tmp_path / "nowhere", new, strategies)
    with pytest.raises(CheckpointError, match="no checkpoint in it"):
        sw.transform_checkpoints(tmp_path, new, strategies)
    with pytest.raises(PlanError, match="cannot be read"):
        sw.transform_checkpoints(run, new, tmp_path / "nowhere.json")
    with pytest.raises(CheckpointError, match="whole already"):
        sw.transform_checkpoints(run / "step-00000001", new)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="it cannot be made"):
        sw.transform_checkpoints(run, tmp_path / "file" / "new", strategies)
    (new / "step-00000002").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="it is there already"):
        sw.transform_checkpoints(run, new, strategies)
    assert [p.name for p in new.iterdir()] == ["step-00000002"]  # nothing was begun


def test_ranks_whose_parts_hold_it(run: Path, strategies: Path, tmp_path: Path) -> None:
    """Just these parts are enough for a rank: with the others taken away its slices can still be read."""
    parts = run / "step-00000002"
    for rank in range(8):
        ranks = sw.rank_list_for_transform(rank, parts, strategies)
        copy = shutil.copytree(parts, tmp_path / "copy")
        for other in set(range(4)) - set(ranks):
            (copy / f"__{other}_0.distcp").unlink()
        held = ParameterStrategies.read(strategies).all
        with StoredTensors(copy) as stored, StoredTensors(parts) as complete:
            for name, storage in held.items():
                assert torch.equal(
                    stored.read(f"model.{name}", storage.slice(rank)),
                    complete.read(f"model.{name}", storage.slice(rank)),
                )
        shutil.rmtree(copy)
    assert sw.rank_list_for_transform(0, parts) == [0, 1, 2, 3]
    assert sw.rank_list_for_transform(3, run / "step-00000001", strategies) == [0]
    with pytest.raises(CheckpointError, match="manifest cannot be read"):
        sw.rank_list_for_transform(3, tmp_path, strategies)


# -- to predict with ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2])
def test_a_whole_model(step: int, run: Path) -> None:
    """The latest model of a run is made; no random number is drawn, no state of one restored."""
    folder = run / f"step-0000000{step}"
    sw.init(devices=4)
    expected, networks = whole(folder), (emptied(Net()), PLANS["level1"](4))
    random = torch.get_rng_state()
    for network in networks:
        sw.load_distributed_checkpoint(network, folder)
        state = network.state_dict()
        assert set(state) == set(expected) and all(torch.equal(state[n], x) for n, x in expected.items())
    assert torch.equal(torch.get_rng_state(), random)
    called = PLANS["columns"](4)
    called(*batch(0))
    sw.load_distributed_checkpoint(called, folder)
    assert all(torch.equal(p, expected[name]) for name, p in called.named_parameters())


@pytest.mark.parametrize(
    "name, text", [("columns", "plan"), ("level1", "inferred"), ("two stages", "file"), ("two stages", "inferred")]
)
def test_the_slices_of_a_rank(name: str, text: str, run: Path, tmp_path: Path) -> None:
    sw.init(devices=4)
    model = PLANS[name](4).save_param_strategy_file(tmp_path / "file").save_operator_strategy_file(tmp_path / "plan")
    inferred = model.infer_layout(*batch(0))
    expected = whole(run / "step-00000002")
    with torch.device("meta"):
        unborn = Net()
    for rank, network in ((0, emptied(Net())), (3, emptied(Net())), (1, unborn)):
        sw.load_distributed_checkpoint(network, run, inferred if text == "inferred" else tmp_path / text, rank_id=rank)
        for called, parameter in network.named_parameters():
            assert torch.equal(parameter, expected[called][inferred[called].slice(rank)]), called
            assert isinstance(parameter, nn.Parameter) and parameter.requires_grad
        sw.load_distributed_checkpoint(emptied(network), run, inferred, rank_id=rank)  # which has slices by now
        assert all(torch.equal(p, expected[n][inferred[n].slice(rank)]) for n, p in network.named_parameters())


def test_parameters_stay_the_optimizers_and_tied_ones_one(tmp_path: Path) -> None:
    sw.init(devices=4)
    net = Net(tied=True)
    sw.save_checkpoint(net, path=tmp_path, step=0)
    network = emptied(Net(tied=True))
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    cut = {
        name: storage
        for name, storage in sw.plan(
            Net(tied=True), batch(0)[:1], CROSS_ENTROPY, batch(0)[1], devices=4, hsdp={"threshold": 0}
        ).parameters.items()
    }
    sw.load_distributed_checkpoint(network, tmp_path, cut, rank_id=2)
    assert network.layers[1].weight is network.layers[2].weight
    assert torch.equal(network.layers[2].weight, net.layers[1].weight[8:12])
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in network.parameters()}


def test_what_both_have_is_loaded_where_that_is_asked_for(run: Path, tmp_path: Path) -> None:
    sw.init(devices=4)
    inferred, expected = PLANS["columns"](4).infer_layout(*batch(0)), whole(run / "step-00000002")
    network = emptied(Net().float())
    network.more = emptied(nn.Linear(2, 2))
    for given in ({}, {"predict_strategy": inferred, "rank_id": 1}):
        with pytest.raises(CheckpointError, match="another model|float"):
            sw.load_distributed_checkpoint(network, run, **given)
        assert untouched(network)
        sw.load_distributed_checkpoint(network, run, strict_load=False, **given)
        box = inferred["layers.0.weight"].slice(1) if given else ...
        assert torch.equal(network.layers[0].weight, expected["layers.0.weight"][box].float())
        assert untouched(network.more)
        network = emptied(Net().float())
        network.more = emptied(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "change, says",
    [
        (
            lambda net, text: setattr(net, "head", nn.Linear(16, 9, dtype=torch.float64)),
            "the network's 'head.weight' is [9, 16]",
        ),
        (lambda net, text: text.pop("head.bias"), "the predict_strategy says nothing of 'head.bias'"),
        (lambda net, text: delattr(net, "norm") or setattr(net, "extra", nn.Linear(2, 2)), "it has no 'extra.weight'"),
        (lambda net, text: setattr(net, "head", nn.Identity()), "it has 'head.weight', which the network does not"),
        (lambda net, text: net.head.float(), "its 'head.weight' is torch.float64, the network's torch.float32"),
    ],
)
def test_slices_of_another_model(change: Callable, says: str, run: Path) -> None:
    sw.init(devices=4)
    inferred = dict(PLANS["columns"](4).infer_layout(*batch(0)))
    network = Net()
    change(network, inferred)
    emptied(network)
    with pytest.raises(CheckpointError) as error:
        sw.load_distributed_checkpoint(network, run, inferred, rank_id=0)
    assert says in str(error.value) and untouched(network)


def test_a_damaged_checkpoint_changes_nothing(run: Path, tmp_path: Path) -> None:
    sw.init(devices=4)
    inferred = PLANS["columns"](4).infer_layout(*batch(0))
    copy = shutil.copytree(run / "step-00000002", tmp_path / "copy")
    data = bytearray((copy / "__2_0.distcp").read_bytes())
    data[-200] ^= 4
    (copy / "__2_0.distcp").write_bytes(data)
    network = emptied(Net())
    for given in ({}, {"predict_strategy": inferred, "rank_id": 1}):
        with pytest.raises(CheckpointError, match="__2_0.distcp"):
            sw.load_distributed_checkpoint(network, copy, **given)
    assert untouched(network)


def test_which_rank(run: Path) -> None:
    sw.init(devices=4)
    model = PLANS["columns"](4)
    inferred = model.infer_layout(*batch(0))
    for wrong in (-1, 4, "0"):
        with pytest.raises(SettingError, match="of 4 devices"):
            sw.load_distributed_checkpoint(Net(), run, inferred, rank_id=wrong)
    with pytest.raises(SettingError, match="no predict_strategy"):
        sw.load_distributed_checkpoint(Net(), run, rank_id=1)
    with pytest.raises(SettingError, match="cuts its parameters itself"):
        sw.load_distributed_checkpoint(model, run, inferred)
    with pytest.raises(CheckpointError, match="no such folder"):
        sw.load_distributed_checkpoint(Net(), run / "nowhere", inferred)


def test_a_list_of_files_stands_for_their_folder(run: Path, tmp_path: Path) -> None:
    """The tutorials' calls: the files of all ranks, by position or by their own word."""
    sw.init(devices=4)
    folder = run / "step-00000002"
    files, expected = sorted(folder.iterdir()), whole(folder)
    inferred = PLANS["columns"](4).infer_layout(*batch(0))
    for given in (
        {"checkpoint": [str(file) for file in files]},
        {"checkpoint": tuple(files), "predict_strategy": inferred, "rank_id": 3},
        {"checkpoint_filenames": files, "predict_strategy": inferred, "train_strategy_filename": "strategy.ckpt"},
        {"checkpoint": [run]},
    ):
        network = emptied(Net())
        sw.load_distributed_checkpoint(network, **given)
        rank = given.get("rank_id", 0)
        for name, parameter in network.named_parameters():
            cut = inferred[name].slice(rank) if "predict_strategy" in given else ()
            assert torch.equal(parameter, expected[name][cut]), name
    for wrong, text in (
        ([], r"checkpoint=\[\]"),
        (None, "checkpoint=None"),
        ([files[0], 3], "checkpoint="),
        ([run / "step-00000001" / "state.json", files[0]], "2 files of the list are in 2 folders: .*step-00000001"),
        ([*files, folder / "rank_9.ckpt"], "rank_9.ckpt: there is no such file"),
    ):
        with pytest.raises(CheckpointError, match=text) as raised:
            sw.load_distributed_checkpoint(Net(), wrong)
        assert "folder" in raised.value.legal or "files of" in raised.value.legal
    with pytest.raises(SettingError, match="no argument 'unified_safetensors_dir'") as raised:
        sw.load_distributed_checkpoint(Net(), unified_safetensors_dir=folder)
    assert "did you mean checkpoint=" in raised.value.legal


def test_a_file_in_the_place_of_a_folder(run: Path, tmp_path: Path) -> None:
    sw.init(devices=4)
    model, file = PLANS["columns"](4), run / "step-00000001" / "manifest.json"
    model(*batch(0))
    for attempt in (
        lambda: sw.load_checkpoint(model, path=file),
        lambda: sw.load_distributed_checkpoint(Net(), file),
        lambda: sw.transform_checkpoints(file, tmp_path / "new"),
    ):
        with pytest.raises(CheckpointError, match=f"it is a file, .* its folder is {file.parent}") as raised:
            attempt()
        assert raised.value.source == str(file)
    for attempt in (
        lambda: sw.save_checkpoint(model, path=file, step=9),
        lambda: sw.CheckpointConfig(file, every_n_steps=1),
    ):
        with pytest.raises(sw.ShardwrightError, match="is a file") as raised:
            attempt()
        assert "folder of" in raised.value.legal


def test_a_folder_of_hugging_face(tmp_path: Path) -> None:
    sw.init(devices=4)
    net, network = Net(), emptied(Net())
    safetensors.torch.save_file(net.state_dict(), tmp_path / "model.safetensors")
    inferred = PLANS["columns"](4).infer_layout(*batch(0))
    sw.load_distributed_checkpoint(network, tmp_path, inferred, rank_id=3)
    assert all(
        torch.equal(p, q[inferred[n].slice(3)]) for (n, p), q in zip(network.named_parameters(), net.parameters())
    )


def _on_ranks(rank: int, world: int, folder: str, expected: str) -> Any:
    sw.init()
    torch.manual_seed(0)
    values = torch.load(expected)
    model = PLANS["columns"](world)
    sw.load_distributed_checkpoint(model, folder)
    loss = model(*batch(5))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to_local(), values[name][model.plan.parameters[name].slice(rank)]), name
    plain = Net()
    sw.load_distributed_checkpoint(plain, folder, model.infer_layout(*batch(5)))  # this process's rank
    assert all(torch.equal(p, q.to_local()) for p, q in zip(plain.parameters(), model.parameters()))
    return loss.item()


def test_on_ranks(run: Path, tmp_path: Path) -> None:
    torch.save(whole(run / "step-00000002"), tmp_path / "values")
    losses = run_ranks(_on_ranks, 2, str(run), str(tmp_path / "values"))
    assert losses[0] == losses[1]
