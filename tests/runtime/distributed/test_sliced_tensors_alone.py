"""A value of parameters that one rank reads alone: the watchdog ends the run, and says what to write instead."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_watchdog import SCENARIOS, WORLD, Ended, Trained, end, grow_impatient, start

from shardwright.runtime.distributed.dtensors import SUBCLASSES_HAVE_VIEWS


def reads_before_a_step(rank: int) -> None:
    model = Trained()
    model.steps(2)
    grow_impatient()
    if rank == 0:
        print(model.net[0].weight.norm().item())
    model.steps(1)


def reads_at_the_end(rank: int) -> None:
    model = Trained()
    model.steps(2)
    assert f"{model.net[0].weight.norm():.3f}" == f"{model.net[0].weight.detach().norm():.3f}"  # all ranks together
    grow_impatient()
    if rank == 0:
        model.net[0].weight.detach().numpy()
    time.sleep(600)


def computes_alone(rank: int) -> None:
    model = Trained()
    model.steps(2)
    grow_impatient()
    if rank == 0:
        model.net[0].weight.detach() + torch.ones(8, 8)
    time.sleep(600)


ALONE = {
    # Torch 2.15 adds the norms of ranks as it computes the norm, earlier ones where it is read.
    "reads_before_a_step": r"rank 0 is at (item\(\) of a tensor of shape \[\] that was computed of parameters, which "
    r"every rank calls \(one rank alone reads inside of `with model\.whole\(rank=0\)`\)|a function of a parameter, "
    r"outside of the model, which every rank calls) in call 2; rank",
    "reads_at_the_end": r"ranks 1-3 have not come to numpy\(\) of a tensor of shape \[8, 8\] that was computed of "
    r"parameters, which every rank calls .*; rank 0 waits there since \d+ s\n"
    r"  rank 1 is at test_sliced_tensors_alone\.py:\d+ in reads_at_the_end",
    "computes_alone": r"have not come to a function of a parameter, outside of the model, which every rank calls in "
    r"call 2; rank 0 waits there since \d+ s",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ended]]:
    folder: Path = tmp_path_factory.mktemp("alone")
    SCENARIOS.update({f.__name__: f for f in (reads_before_a_step, reads_at_the_end, computes_alone)})
    running = {name: start(name, folder) for name in ALONE}
    yield {name: end(name, ranks, folder) for name, ranks in running.items()}
    for name in ALONE:
        del SCENARIOS[name]


@pytest.mark.skipif(not SUBCLASSES_HAVE_VIEWS, reason="parameters are plain DTensors with this torch")
@pytest.mark.parametrize("name", ALONE)
def test_a_rank_that_reads_alone_is_named(name: str, ended: dict[str, Ended]) -> None:
    for rank in range(WORLD):
        assert ended[name].codes[rank] == 1, ended[name]
        assert re.search(ALONE[name], ended[name].wrote[rank]), ended[name].wrote[rank]
