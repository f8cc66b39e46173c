"""The JSON Schemas of the reference: of each format, and no stricter than its reader."""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import trained
from document_schemas import FORMATS, faults, validator
from mutations import places
from paths import DOCS, SUPPORT
from plan_documents import PLANS, made

import shardwright as sw
from shardwright.checkpoint import manifest
from shardwright.cluster import PRESETS, Cluster
from shardwright.errors import ShardwrightError
from shardwright.planfile.document_writer import written
from shardwright.planfile.parameter_file import ParameterStrategies

EARLIER = SUPPORT / "earlier_plans"
CHECKPOINTS = sorted((SUPPORT / "earlier_checkpoints").rglob("manifest.json"))


def valid(name: str, text: str) -> bool:
    return faults(name, json.loads(text)) == []


# -- documents that the package writes ---------------------------------------------------------------------------------


def test_schemas_are_those_of_the_readers_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    schemas = importlib.import_module("schemas")
    found = schemas.made()
    assert sorted(path.name for path in found) == sorted(f"{name}.schema.json" for name in FORMATS)
    assert {path.name for path, text in found.items() if path.read_text(encoding="utf-8") != text} == set(), (
        "python docs/schemas.py"
    )


@pytest.mark.parametrize("name", FORMATS)
def test_every_field_has_a_description(name: str) -> None:
    """Editors show it."""

    def walk(schema: Any, at: str) -> list[str]:
        if isinstance(schema, list):
            return [fault for i, part in enumerate(schema) for fault in walk(part, f"{at}[{i}]")]
        if not isinstance(schema, dict):
            return []
        bare = [
            f"{at}.{field}"
            for field, value in schema.get("properties", {}).items()
            if not {"description", "$ref", "const"} & set(value)
        ]
        return bare + [fault for key, part in schema.items() for fault in walk(part, f"{at}.{key}")]

    assert walk(validator(name).schema, name) == []


def test_every_cluster_is_valid() -> None:
    for name in [*PRESETS, "h100x8x128"]:
        assert faults("cluster", json.loads(json.dumps(Cluster.of(name).to_dict()))) == [], name


@pytest.mark.parametrize("name", [name for name in PLANS if name != "gpt, searched"])  # which is made for seconds
def test_every_plan_and_its_parameters_are_valid(name: str) -> None:
    plan = made(name)
    assert faults("plan", json.loads(written(plan))) == []
    assert faults("parameters", json.loads(ParameterStrategies.of(plan).text())) == []


def test_earlier_documents_are_valid() -> None:
    assert valid("plan", (EARLIER / "program.json").read_text())
    assert valid("pipeline", (EARLIER / "pipeline.json").read_text())
    assert len(CHECKPOINTS) == 2
    for path in CHECKPOINTS:
        assert valid("manifest", path.read_text()) and valid("plan", (path.parent / "plan.json").read_text())


def test_a_kind_of_file_is_not_another() -> None:
    """Each document is valid by its own schema alone."""
    for name, text in documents().items():
        assert [other for other in FORMATS if valid(other, text)] == [name]


def test_the_page_has_every_key_and_its_examples_are_valid() -> None:
    text = (DOCS / "reference" / "files.md").read_text(encoding="utf-8")
    parts = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    titles = ("Cluster", "Plan", "Plan of a pipeline", "Parameter strategies", "Manifest of a checkpoint")
    for name, title in zip(FORMATS, titles, strict=True):
        rows = [line.split("|")[1:3] for line in parts[title].splitlines() if line.startswith("| `")]
        schema = validator(name).schema
        assert [key.strip(" `") for key, _ in rows] == list(schema["properties"])
        assert {key.strip(" `") for key, needed in rows if needed.strip()} == set(schema["required"])
    example = parts["Cluster"].split("```json\n")[1].split("```")[0]
    assert valid("cluster", example) and Cluster.from_dict(json.loads(example)).devices == 16
    editor = json.loads(parts["An editor that completes and checks"].split("```json\n")[1].split("```")[0])
    for entry in editor["json.schemas"]:
        assert (DOCS / "reference" / "schemas" / Path(entry["url"]).name).is_file()


@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_is_valid(whole: bool, tmp_path: Path) -> None:
    model, optimizer = trained()
    path = sw.save_checkpoint(model, optimizer, tmp_path, step=1, integrated_save=whole).wait()
    assert valid("manifest", (path / "manifest.json").read_text())
    assert valid("plan", (path / "plan.json").read_text())


@pytest.mark.parametrize("name", FORMATS)
def test_a_schema_has_a_name_of_its_own(name: str) -> None:
    names = [validator(each).schema["$id"] for each in FORMATS]
    assert len(set(names)) == len(FORMATS) and all(each.startswith("urn:shardwright:schema:") for each in names)
    assert bool(faults(name, {"$schema": 1})) and any("schema" in fault for fault in faults(name, {"$schema": 1}))


def test_a_file_may_name_its_schema(tmp_path: Path) -> None:
    """Readers of edited files leave the field out; another value than a text, and other fields, are errors."""
    cluster = tmp_path / "a.cluster.json"
    written_cluster = Cluster.of("h100x8").to_dict()
    cluster.write_text(json.dumps({"$schema": "./cluster.schema.json", **written_cluster}))
    assert Cluster.load(cluster) == Cluster.of("h100x8") and faults("cluster", json.loads(cluster.read_text())) == []
    for wrong in ({"$schema": 1}, {"$comment": "x"}):
        cluster.write_text(json.dumps({**wrong, **written_cluster}))
        with pytest.raises(ShardwrightError):
            Cluster.load(cluster)
        assert faults("cluster", json.loads(cluster.read_text()))
    plan = sw.plan(torch.nn.Linear(8, 8), (torch.ones(4, 8),), devices=4, parallel_mode="data_parallel")
    plan.save(tmp_path / "a.plan.json")
    text = (tmp_path / "a.plan.json").read_text()
    (tmp_path / "b.plan.json").write_text(text.replace("{", '{"$schema": "plan.schema.json",', 1))
    assert sw.Plan.load(tmp_path / "b.plan.json").fingerprint == plan.fingerprint
    assert faults("plan", json.loads((tmp_path / "b.plan.json").read_text())) == []


# -- changed documents: refused by the schema where the reader refuses them --------------------------------------------

#: One value of each type of JSON.
VALUES: list[Any] = [None, True, 7, "x", [], [7], ["x"], {}, {"a": 1}]

#: Keys below which the reader knows more than the schema: the model, or the size of a tensor.
MODEL = {
    "cluster": (),
    "plan": ("dataset_strategy", "in_strategy", "out_strategy", "storage"),
    "pipeline": ("dataset_strategy", "in_strategy", "out_strategy", "storage"),
    "parameters": ("storage",),
    "manifest": ("shape", "pieces"),
}

#: Objects of a manifest whose keys are names.
NAMED = ("files", "tensors")


@cache
def documents() -> dict[str, str]:
    """A document of each format."""
    return {
        "cluster": json.dumps(Cluster.of("h100x8x128").to_dict()),
        "plan": written(made("tutorial, hsdp")),
        "pipeline": (EARLIER / "pipeline.json").read_text(),
        "parameters": ParameterStrategies.of(made("tutorial, fed by Layouts")).text(),
        "manifest": CHECKPOINTS[0].read_text(),
    }


@cache
def starts(name: str) -> list[Any]:
    """The documents of a format that are changed."""
    more = {
        "plan": [written(made(plan)) for plan in ("hybrid_parallel", "gpt, recomputed", "tutorial by Layouts")],
        "parameters": [ParameterStrategies.of(made("resnet")).text()],
        "manifest": [path.read_text() for path in CHECKPOINTS[1:]],
    }
    return [json.loads(text) for text in (documents()[name], *more.get(name, ()))]


def resealed(words: Any) -> str:
    """The text of a manifest with a seal that holds, where it has one at its end."""
    if not isinstance(words, dict) or not isinstance(words.get("seal"), str):
        return json.dumps(words)
    body = json.dumps({key: value for key, value in words.items() if key != "seal"})[:-1]
    return f'{body},\n "seal": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def refused(name: str, words: Any, folder: Path) -> ShardwrightError | None:
    """The error of the reader, or None."""
    path = folder / f"{name}.json"
    path.write_text(resealed(words) if name == "manifest" else json.dumps(words))
    readers: dict[str, Callable[[], Any]] = {
        "cluster": lambda: Cluster.load(path),
        "plan": lambda: sw.Plan.load(path),
        "pipeline": lambda: sw.Plan.load(path),
        "parameters": lambda: ParameterStrategies.read(path),
        "manifest": lambda: manifest.parsed(path.read_text(), json.loads(path.read_text()), str(path)),
    }
    try:
        readers[name]()
    except ShardwrightError as error:
        return error
    return None


def json_type(value: Any) -> str:
    return {bool: "boolean", int: "number", float: "number"}.get(type(value), type(value).__name__)


def kind_of_place(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """A path without indices, and without the names of files and tensors."""
    return tuple("*" if not isinstance(key, str) or path[i - 1] in NAMED else key for i, key in enumerate(path))


def kinds(name: str) -> dict[tuple[Any, ...], list[tuple[int, tuple[Any, ...]]]]:
    """By kind of place, True for its key and False for its value: the documents and paths that have one.

    Lines of the stages of a pipeline are those of a plan, and left out.
    """
    found: dict[tuple[Any, ...], list[tuple[int, tuple[Any, ...]]]] = {}
    for number, words in enumerate(starts(name)):
        for path in filter(None, places(words)):
            if path[0] == "stages" and len(path) > 4 and path[2] in ("operators", "parameters"):
                continue
            is_key = isinstance(path[-1], str) and path[-2:-1] not in [(name,) for name in NAMED]
            for misspell in (False, True)[: 1 + is_key]:
                found.setdefault((misspell, *kind_of_place(path)), []).append((number, path))
    return found


def changes(name: str, rng: random.Random) -> Iterator[tuple[Any, tuple[Any, ...], str]]:
    """Documents with one key misspelt or one value of another type, with the place, and the change in words.

    At least 100: each kind of place once, at random where it stands several times, and some again.
    """
    found = kinds(name)
    chosen = rng.sample(sorted(found), len(found))
    chosen += rng.choices(chosen, k=max(0, 100 - len(chosen)))
    for kind in chosen:
        number, path = rng.choice(found[kind])
        words = copy.deepcopy(starts(name)[number])
        around = words
        for key in path[:-1]:
            around = around[key]
        key = path[-1]
        if kind[0]:
            at = rng.randrange(len(key))
            other = rng.choice([key[:at] + key[at] + key[at:], key[:at] + "q" + key[at + 1 :], key + "s", key.upper()])
            if other in around:
                other = f"{key}_"
            around[other] = around.pop(key)
            yield words, path, f"{key} -> {other}"
        else:
            around[key] = copy.deepcopy(rng.choice([x for x in VALUES if json_type(x) != json_type(around[key])]))
            yield words, path, f"= {around[key]!r}"


@pytest.mark.parametrize("name", FORMATS)
def test_a_changed_document_is_invalid_where_its_reader_refuses_it(name: str, tmp_path: Path) -> None:
    """The schema may be laxer below the keys of `MODEL`; nowhere is it stricter."""
    count = both = 0
    for words, path, change in changes(name, random.Random(name)):
        error, wrong = refused(name, words, tmp_path), faults(name, words)
        place = f"{'.'.join(map(str, path))} {change}"
        assert error is not None or not wrong, f"the reader takes {place}, and the schema finds {wrong}"
        known = set(path) & set(MODEL[name])
        assert error is None or wrong or known, f"the schema takes {place}, and the reader says {error}"
        count, both = count + 1, both + (error is not None and bool(wrong))
    assert count >= 100 and both >= 50


@pytest.mark.parametrize("name", FORMATS)
def test_documents_as_they_are_pass_both(name: str, tmp_path: Path) -> None:
    for words in starts(name):
        assert refused(name, words, tmp_path) is None and faults(name, words) == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cluster", lambda words: words.update(schema=True)),
        ("plan", lambda words: words.update(uneven="yes")),
        ("plan", lambda words: words["parameters"][0].update(settled=1)),
        ("plan", lambda words: words["parameters"][1]["storage"].__setitem__(1, True)),
        ("pipeline", lambda words: words["pipeline"].update(chunk=1)),
        ("parameters", lambda words: words.update(uneven="yes")),
    ],
)
def test_a_value_that_nothing_would_honour_is_refused(name: str, change: Callable, tmp_path: Path) -> None:
    words = copy.deepcopy(starts(name)[0])
    change(words)
    assert refused(name, words, tmp_path) is not None and faults(name, words)


@pytest.mark.parametrize("change", [{"loss": 1}, {"losses": True}])
def test_the_fields_of_own_programs_are_checked(change: dict[str, Any], tmp_path: Path) -> None:
    words = copy.deepcopy(starts("plan")[1])
    words["own"].update(change)
    assert refused("plan", words, tmp_path) is not None and faults("plan", words)
