"""Digests of files: of order as well as content, block by block; checkpoints with the digest of schema 1 still load."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from paths import BENCHMARKS, SUPPORT
from torch import nn

import shardwright as sw
from shardwright.checkpoint import manifest
from shardwright.checkpoint.digests import ALGORITHMS, BLOCK, digest, shares
from shardwright.errors import CheckpointError

sys.path.append(str(BENCHMARKS))
from damage import BYTES

EARLIER = SUPPORT / "earlier_checkpoints"


@hypothesis.given(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 5 * BLOCK)), st.integers(1, 7))
def test_shares_cover_every_block_once(sizes: dict[str, int], parts: int) -> None:
    seen = [
        (name, block)
        for part in range(parts)
        for name, first, last in shares(sizes, part, parts)
        for block in range(first, last)
    ]
    assert seen == [(name, block) for name, size in sizes.items() for block in range(-(-size // BLOCK))]


@pytest.mark.parametrize("schema", ALGORITHMS)
def test_digests_of_blocks(schema: int, tmp_path: Path) -> None:
    path, algorithm = tmp_path / "file", ALGORITHMS[schema]
    digits = algorithm.digits
    path.write_bytes(random.Random(0).randbytes(BLOCK + 5))
    whole = digest(path, algorithm=algorithm)
    assert len(whole) == 2 * digits
    assert digest(path, 0, 1, algorithm) + digest(path, 1, None, algorithm) == whole
    content = bytearray(path.read_bytes())
    content[BLOCK + 1] ^= 1
    path.write_bytes(content)
    changed = digest(path, algorithm=algorithm)
    assert changed[:digits] == whole[:digits] and changed[digits:] != whole[digits:]
    path.write_bytes(b"")
    assert digest(path, algorithm=algorithm) == ""


@pytest.mark.parametrize("kind", BYTES)
def test_no_damage_has_the_digest_of_what_was_there(kind: str, tmp_path: Path) -> None:
    path, rng = tmp_path / "file", random.Random(kind)
    content = rng.randbytes((3 if kind == "blocks exchanged" else 1) * BLOCK + 5000)
    path.write_bytes(content)
    before = digest(path)
    for _ in range(5):
        damaged = BYTES[kind](content, rng)
        assert damaged != content
        path.write_bytes(damaged)
        assert digest(path) != before


def test_the_digest_of_schema_1_does_not_see_rows_exchanged(tmp_path: Path) -> None:
    path, rng = tmp_path / "file", random.Random(0)
    path.write_bytes(content := rng.randbytes(100_000))
    before = digest(path, algorithm=ALGORITHMS[1])
    path.write_bytes(BYTES["rows exchanged"](content, rng))
    assert digest(path, algorithm=ALGORITHMS[1]) == before, "which is why it is no longer written"


@pytest.mark.parametrize("kind", ["whole", "parts"])
def test_checkpoints_of_an_earlier_version(kind: str, tmp_path: Path) -> None:
    folder = EARLIER / kind / "step-00000003"
    assert manifest.read(folder).schema == 1 and manifest.verify(folder) == []
    sw.init(devices=2)
    torch.manual_seed(9)
    net = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    model = sw.AutoParallel(net, nn.MSELoss())
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    restored = sw.load_checkpoint(model, optimizer, EARLIER / kind, schedulers=schedule)
    assert (restored.step, restored.extra) == (3, {"note": "of version 0.1", "best": float("inf")})
    losses = []
    for _ in range(2):
        loss = model(torch.ones(4, 6), torch.zeros(4, 2))
        losses.append(loss.item())
        loss.backward(), optimizer.step(), optimizer.zero_grad(), schedule.step()
    assert losses == pytest.approx(
        {  # of the run that went on
            "whole": [0.12743236124515533, 0.1278071403503418],
            "parts": [0.15934649109840393, 0.12029238045215607],
        }[kind],
        rel=1e-5,
    )
    made = sw.save_checkpoint(model, optimizer, tmp_path, step=5, schedulers=schedule).wait()
    assert manifest.read(made).schema == 2

    copy = Path(shutil.copytree(folder, tmp_path / "copy" / folder.name))
    name = "model.safetensors" if kind == "whole" else "__0_0.distcp"
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(CheckpointError, match="it was altered within bytes 0 to"):
        sw.load_checkpoint(model, optimizer, copy)
