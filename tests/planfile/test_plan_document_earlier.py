"""Plan files that an earlier version wrote: they are read, and say what a plan made today says."""

from __future__ import annotations

import pytest
import torch
from paths import SUPPORT
from torch import Tensor, nn

import shardwright as sw

FOLDER = SUPPORT / "earlier_plans"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.drop, self.down = nn.Linear(8, 32), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 8)
        sw.shard(self.up, ((2, 1), (2, 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(self.norm(self.up(x))).reshape(-1, 32)))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Net(), Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def batch() -> tuple[Tensor, Tensor]:
    return torch.zeros(16, 8), torch.zeros(16, 8)


#: Fingerprints are of graphs, which other versions of torch export with other operators.
SAME_GRAPHS = pytest.mark.skipif(
    torch.__version__ < "2.10", reason=f"torch {torch.__version__} exports other operators than the plans' version"
)


@SAME_GRAPHS
def test_a_plan_of_an_earlier_version() -> None:
    (x, y), read = batch(), sw.Plan.load(FOLDER / "program.json")
    made = sw.plan(Net(), (x,), nn.MSELoss(), y, devices=4, parallel_mode="dynamic_programming")
    assert read.fingerprint == made.fingerprint and read.cost == made.cost
    assert [(o.name, o.in_strategy, o.cause) for o in read.operators] == [
        (o.name, o.in_strategy, o.cause) for o in made.operators
    ]


@SAME_GRAPHS
def test_a_pipeline_of_an_earlier_version() -> None:
    (x, y), read = batch(), sw.PipelinePlan.load(FOLDER / "pipeline.json")
    made = sw.plan(
        Two(),
        (x,),
        nn.MSELoss(),
        y,
        devices=8,
        parallel_mode="semi_auto",
        pipeline=dict(stages=2, micro_batches=2, stage_config={"a": 0, "b": 1}),
    )
    assert read.fingerprint == made.fingerprint
    assert [stage.plan.fingerprint for stage in read.stages] == [stage.plan.fingerprint for stage in made.stages]


def test_a_plan_of_an_earlier_version_is_followed() -> None:
    """The file's strategies as marks of a model: it trains as planned then."""
    torch.manual_seed(0)
    net, (x, y) = Net(), (torch.randn(16, 8), torch.randn(16, 8))
    sw.init(devices=4)
    model = sw.AutoParallel(net, nn.MSELoss(), parallel_mode="semi_auto")
    model.load_operator_strategy_file(FOLDER / "program.json")
    model(x, y).backward()
    assert model.plan.devices == 4 and all(p.grad is not None for p in model.parameters())
    assert {o.name: o.in_strategy for o in model.plan.operators}["up"] == ((2, 1), (2, 1), (2,))
