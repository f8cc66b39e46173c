"""Every reader of files: whatever stands in a file, it is read, or refused by an error of the family.

550 mutations of a small document for each reader. Documents with digests of their own are sealed again after the
mutation, so that what is behind the digest is reached too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from mutations import mutated, mutated_text
from torch import nn

import shardwright as sw
from shardwright.checkpoint import manifest
from shardwright.checkpoint.digests import digest
from shardwright.checkpoint.stored_checkpoint import StoredTensors
from shardwright.errors import ShardwrightError
from shardwright.launch.environment import expand, find
from shardwright.pipeline.schedules import read as read_schedule
from shardwright.planfile import read_document
from shardwright.planfile.encoding import fingerprint_of, packed, unpacked
from shardwright.planfile.parameter_file import ParameterStrategies
from shardwright.planners.planning_problem import PLANNERS

#: A mutation of a file's text, and the reading of the file.
Reader = tuple[Callable[[random.Random], str | bytes], Callable[[Path], Any]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)
        sw.shard(self.up, ((2, 1), (2, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@lru_cache
def folder() -> Path:
    _folders.append(tempfile.TemporaryDirectory())
    return Path(_folders[0].name)


#: Removed at the end of the process.
_folders: list[tempfile.TemporaryDirectory[str]] = []


@lru_cache
def plan() -> sw.Plan:
    return sw.plan(Net(), (torch.empty(8, 4),), nn.MSELoss(), torch.empty(8, 2), devices=4, parallel_mode="semi_auto")


@lru_cache
def texts() -> dict[str, str]:
    """The documents, by reader."""
    path = folder()
    plan().save(path / "plan.json")
    sw.plan(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        (torch.empty(8, 4),),
        nn.MSELoss(),
        torch.empty(8, 4),
        devices=4,
        pipeline=dict(stages=2, micro_batches=2, stage_config={"0": 0, "1": 1}),
    ).save(path / "pipeline.json")
    ParameterStrategies.of(plan()).save(path / "parameters.json")
    sw.Cluster.of("h100x8x2").save(path / "cluster.json")
    table = {
        "version": "1.0",
        "server_count": "2",
        "server_list": [
            {
                "server_id": f"10.0.0.{s}",
                "device": [
                    {"device_id": str(d), "device_ip": f"10.1.{s}.{d}", "rank_id": str(2 * s + d)} for d in (0, 1)
                ],
            }
            for s in (0, 1)
        ],
        "status": "completed",
    }
    (path / "table.json").write_text(json.dumps(table, indent=1))
    names = ("plan", "pipeline", "parameters", "cluster", "table")
    return {name: (path / f"{name}.json").read_text() for name in names}


@lru_cache
def checkpoints() -> dict[str, Path]:
    """A checkpoint of each kind, and a folder as Hugging Face writes it."""
    sw.init(devices=2)
    out: dict[str, Path] = {}
    for kind, whole in (("whole", True), ("parts", False)):
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step(), schedule.step()
        out[kind] = sw.save_checkpoint(
            net, optimizer, folder() / kind, step=3, schedulers=schedule, integrated_save=whole, extra={"a": (1, 2.5)}
        ).wait()
    face = out["face"] = folder() / "face"
    face.mkdir()
    tensors = nn.Linear(3, 2).state_dict()
    for name, tensor in tensors.items():
        safetensors.torch.save_file({name: tensor}, face / f"{name}.safetensors")
    index = {"metadata": {"total_size": 32}, "weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (face / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


def resealed(text: str) -> str:
    """A manifest's text with the seal of what stands in it now."""
    body = text.rpartition(',\n "seal": "')[0]
    return f'{body},\n "seal": "{hashlib.sha256(body.encode("utf-8", "replace")).hexdigest()}"\n}}\n'


def manifests(kind: str) -> Reader:
    text = (checkpoints()[kind] / "manifest.json").read_text()

    def change(rng: random.Random) -> str:
        words = json.loads(text)
        seal = words.pop("seal")
        made = mutated(json.dumps(words), rng)
        return resealed(made.rstrip().removesuffix("}") + f',\n "seal": "{seal}"\n}}\n')

    def read(path: Path) -> None:
        copy = path.parent / "manifest"
        copy.mkdir(exist_ok=True)
        shutil.copyfile(path, copy / "manifest.json")
        made = manifest.read(copy)
        assert manifest.parsed(made.text(), json.loads(made.text()), "again") == made
        manifest.verify(copy)
        StoredTensors(copy, made).close()

    return change, read


def states() -> Reader:
    source = checkpoints()["parts"]
    text = (source / "state.json").read_text()
    words = json.loads(text)
    words["random"] = {"ranks": [0], "states": [{"stream": {"seed": 1, "calls": 2}}]}  # the others are long
    short = json.dumps(words)

    def change(rng: random.Random) -> str:
        return mutated(rng.choice((short, short, short, text)), rng)

    def read(path: Path) -> None:
        copy = path.parent / "state" / source.name
        if not copy.exists():
            shutil.copytree(source, copy)
        shutil.copyfile(path, copy / "state.json")
        made, file = manifest.read(source), copy / "state.json"
        files = {**made.files, file.name: manifest.CheckpointFile(file.stat().st_size, digest(file))}
        (copy / "manifest.json").write_text(replace(made, files=files).text())  # without a wait for the disk
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        before = torch.get_rng_state()
        try:
            sw.load_checkpoint(net, optimizer, copy, schedulers=schedule)
        finally:
            torch.set_rng_state(before)
        for group in optimizer.param_groups:
            assert type(group["lr"]) in (int, float) and 0 <= group["lr"] < float("inf")
            assert type(group["nesterov"]) in (bool, type(None))

    return change, read


def headers() -> Reader:
    content = (checkpoints()["face"] / "weight.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    text, tensors = content[8 : 8 + length].decode(), content[8 + length :]

    def change(rng: random.Random) -> bytes:
        head = mutated(text, rng).encode("utf-8", "replace")
        size = len(head) if rng.random() < 0.9 else rng.choice((0, 1, 2**63, len(head) + 100))
        return size.to_bytes(8, "little") + head + tensors[: rng.choice((len(tensors), len(tensors), 3))]

    def read(path: Path) -> None:
        copy = path.parent / "headers"
        copy.mkdir(exist_ok=True)
        shutil.copyfile(path, copy / "model.safetensors")
        with StoredTensors(copy) as stored:
            for name in stored.names:
                stored.read(name)

    return change, read


def indexes() -> Reader:
    face = checkpoints()["face"]
    text = (face / "model.safetensors.index.json").read_text()

    def read(path: Path) -> None:
        copy = path.parent / "index"
        if not copy.exists():
            shutil.copytree(face, copy)
        shutil.copyfile(path, copy / "model.safetensors.index.json")
        with StoredTensors(copy) as stored:
            for name in stored.names:
                stored.read(name)

    return lambda rng: mutated(text, rng), read


def captured(text: str) -> Callable[[random.Random], str]:
    """A plan whose captured graph is changed, under the fingerprint of what it is now."""

    def change(rng: random.Random) -> str:
        words = json.loads(text)
        held = unpacked(words["captured"])
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            held = json.loads(mutated(json.dumps(held), rng))
            words["graph"] = fingerprint_of(held["graph"])
        words["captured"] = packed(held)
        return json.dumps(words, indent=1)

    return change


def on_a_model(path: Path) -> None:
    """The strategies on a graph that is captured once, as `AutoParallel.load_operator_strategy_file` puts them."""
    document = read_document(path)
    document.onto(plan().graph, 4, PLANNERS["semi_auto"])


SCHEDULE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
ENVIRON = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "2(x4)",
    "SLURM_NODELIST": "node[01-03,07]",
    "SLURM_JOB_ID": "7",
}


LONG = ["1" * 10_000, "node[0-99999999]", "n[1-2]" * 40, "[" * 1000, "2(x99999999)", "³"]


def environments() -> Reader:
    def change(rng: random.Random) -> str:
        environ = dict(ENVIRON)
        for _ in range(rng.choice((1, 2))):
            key = rng.choice([*environ])
            text = rng.choice(
                ["1" * 10_000, "node[0-99999999]", "n[1-2]" * 40, "[" * 1000, "2(x99999999)", "³", environ[key]]
            )
            environ[key] = mutated_text(text, rng)
        return json.dumps(environ)

    def read(path: Path) -> None:
        environ = json.loads(path.read_text())
        find(environ)
        expand(environ["SLURM_NODELIST"], "SLURM_NODELIST")

    return change, read


def of_text(name: str, read: Callable[[Path], Any]) -> Reader:
    return lambda rng: mutated(texts()[name], rng), read


READERS: dict[str, Callable[[], Reader]] = {
    "plan": lambda: of_text("plan", sw.Plan.load),
    "plan, captured": lambda: (captured(texts()["plan"]), sw.Plan.load),
    "plan on a model": lambda: of_text("plan", on_a_model),
    "pipeline": lambda: of_text("pipeline", sw.Plan.load),
    "parameter strategies": lambda: of_text("parameters", ParameterStrategies.read),
    "cluster": lambda: of_text("cluster", sw.Cluster.load),
    "rank table": lambda: of_text("table", lambda path: find({"RANK_TABLE_FILE": str(path), "RANK_ID": "3"})),
    "environment": environments,
    "manifest, whole": lambda: manifests("whole"),
    "manifest, parts": lambda: manifests("parts"),
    "state": states,
    "safetensors header": headers,
    "Hugging Face index": indexes,
    "schedule": lambda: (lambda rng: mutated_text(SCHEDULE, rng), lambda path: read_schedule(path, 2, 2, None)),
}


def check(name: str, count: int) -> None:
    change, read = READERS[name]()
    path, refused = folder() / f"{name.replace(',', '')}.file", 0
    first = zlib.crc32(f"{name}, {count}".encode()) if os.environ.get("CI") else random.randrange(2**64)
    for seed in range(first, first + count):
        made = change(random.Random(seed))
        path.write_bytes(made if isinstance(made, bytes) else made.encode("utf-8", "surrogatepass"))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(path)
        except ShardwrightError as error:
            refused += 1
            assert error.legal and len(str(error)) < 10_000, f"seed {seed}: {error}"
            str(error).encode()
        except Exception as error:  # of a reader that neither reads nor refuses
            raise AssertionError(f"seed {seed}: {type(error).__name__}") from error
    assert refused > count // 3, f"{refused} of {count} were refused"


@pytest.mark.parametrize("name", READERS)
def test_whatever_stands_in_a_file_it_is_read_or_refused(name: str) -> None:
    check(name, 50)


@pytest.mark.parametrize("name", ["RANK", "PMI_RANK", "OTHER_RANK", "OTHER_SIZE", "MS_WORKER_NUM", "SLURM_PROCID"])
def test_a_variable_of_10_000_digits(name: str) -> None:
    with contextlib.suppress(ShardwrightError):
        find({"PMI_RANK": "0", "OTHER_RANK": "0", "OTHER_SIZE": "2", name: "1" * 10_000})


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_whatever_stands_in_a_file_in_500_cases(name: str) -> None:
    check(name, 500)
