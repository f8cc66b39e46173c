"""Mixed precision on two and four Gloo ranks: parameters are DTensors of the stored type, what travels is of the
policy's.

Ranks are started once for each world size; each scenario runs on every rank and asserts there.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from mixed_precision_reference import APART, Net, apart, assert_trains_alike, batches, loss_of, reference
from one_device import parallel
from pipeline_networks import Chain, setting
from ranks import run_ranks, run_scenarios
from small_networks import D, draw
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.runtime.distributed import collectives
from shardwright.runtime.distributed.gradient_sums import SumInTurns

EXACT = sw.MixedPrecision(torch.float32, D, D)
BF16 = sw.MixedPrecision(torch.bfloat16, torch.float32, torch.float32)
ALL_BF16 = sw.MixedPrecision(torch.bfloat16, output_dtype=torch.float32)


def wrapped(
    net: nn.Module,
    policy: sw.MixedPrecision,
    mode: str = "data_parallel",
    level: str | None = None,
    dataset: str = "full_batch",
    loss_fn: Any = loss_of,
    **options: Any,
) -> sw.AutoParallel:
    sw.init()
    model = sw.AutoParallel(net, loss_fn, parallel_mode=mode, mixed_precision=policy, **options).dataset_strategy(
        dataset
    )
    return model if level is None else model.hsdp(threshold=0, optimizer_level=level)


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def feeding(dataset: str) -> Callable[[Tensor], Tensor]:
    return lambda x: x if dataset == "full_batch" else x.chunk(dist.get_world_size())[dist.get_rank()]


@contextlib.contextmanager
def log() -> Iterator[list[tuple[str, torch.dtype]]]:
    """The collectives of programs that are made and run meanwhile: (kind, type), one entry a collective."""
    text: list[tuple[str, torch.dtype]] = []
    before = {name: getattr(collectives, name) for name in ("gather", "reduce_scatter", "all_reduce")}
    turns, inside = SumInTurns.__call__, [False]

    def watched(name: str, make: Callable) -> Callable:
        def made(*args: Any) -> Callable[[Tensor], Tensor]:
            run = make(*args)

            def noted(x: Tensor) -> Tensor:
                if inside[0]:  # an all-reduce may be made of the other two
                    return run(x)
                text.append((name, x.dtype))
                inside[0] = True
                try:
                    return run(x)
                finally:
                    inside[0] = False

            return noted

        return made

    def sums(self: SumInTurns, x: Tensor, rides: bool = False) -> Iterator:
        text.append(("bucket", x.dtype))
        return turns(self, x, rides)

    try:
        for name, make in before.items():
            setattr(collectives, name, watched(name, make))
        SumInTurns.__call__ = sums
        yield text
    finally:
        for name, make in before.items():
            setattr(collectives, name, make)
        SumInTurns.__call__ = turns


# -- scenarios ---------------------------------------------------------------------------------------------------------


def trains(
    policy: sw.MixedPrecision, stored: torch.dtype, mode: str, level: str | None, dataset: str, rank: int, world: int
) -> None:
    net = Net(stored, marks=world if mode == "semi_auto" and world > 2 else 0)
    one = copy.deepcopy(net)
    model = wrapped(net, policy, mode, level, dataset)
    assert_trains_alike(
        model,
        net,
        one,
        policy,
        batches(stored, 3),
        max(APART[policy.param_dtype], 10 * APART[stored]),
        make=partial(torch.optim.SGD, lr=0.2, momentum=0.9),
        part=feeding(dataset),
        whole=lambda name, x: full(x),
    )
    assert all(type(p.data) is DTensor or isinstance(p, DTensor) for p in net.parameters())
    assert {p.dtype for p in net.parameters()} == {p.to_local().dtype for p in net.parameters()} == {stored}
    if level is not None:
        assert net.up.weight.to_local().numel() < net.up.weight.numel()


def optimizes(rank: int, world: int) -> None:
    """AdamW, clipping and accumulation on the stored weights, whole and cut: as one device that accumulates in
    float64."""
    for level in (None, "level1", "level2"):
        net = Net(D)
        one = copy.deepcopy(net)
        model = wrapped(net, EXACT, level=level)
        ours, theirs = (torch.optim.AdamW(n.parameters(), lr=1e-3, fused=n is net) for n in (net, one))
        first, second, third = batches(D, 3)
        for _step in range(2):
            with model.no_sync():
                for batch in (first, second):
                    model(*batch).backward()
                    loss_of(reference(one, EXACT, *batch[:-1]), batch[-1]).backward()
            model(*third).backward()
            loss_of(reference(one, EXACT, *third[:-1]), third[-1]).backward()
            for p, q in zip(net.parameters(), one.parameters()):
                assert p.grad.dtype == D and apart(full(p.grad), q.grad) < 1e-5
            norms = [full(torch.as_tensor(nn.utils.clip_grad_norm_(n.parameters(), 0.1))) for n in (net, one)]
            assert norms[0].dtype == D and apart(*norms) < 1e-5
            ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
        assert {s.dtype for p in net.parameters() for k, s in ours.state[p].items() if k != "step"} == {D}
        for p, q in zip(net.parameters(), one.parameters()):
            assert apart(full(p.detach()), q.detach()) < 1e-5


def kept_gradients_are_wide(rank: int, world: int) -> None:
    """Under no_sync a small gradient beside a large one is not lost: terms are kept in the stored type."""
    for level in (None, "level1"):
        net = nn.Linear(8, 8, bias=False)
        nn.init.zeros_(net.weight)
        model = wrapped(net, BF16, level=level, loss_fn=nn.MSELoss(reduction="sum"))
        x = torch.ones(world, 8)
        with model.no_sync():
            model(x, torch.full((world, 8), 512.0)).backward()
        model(x, torch.full((world, 8), 1.0)).backward()
        assert torch.equal(
            full(net.weight.grad), torch.full((8, 8), -2.0 * world * 513)
        )  # 513 is no number of bfloat16


def travels(rank: int, world: int) -> None:
    """Buckets of the sums' type, weights gathered after the cast, gradients scattered in the sums' type, and nothing
    more."""
    batch, low, high = batches(torch.float32)[0], torch.bfloat16, torch.float32
    for policy, summed in ((BF16, high), (ALL_BF16, low)):
        for level in (None, "level1", "level3"):
            if policy is ALL_BF16 and level == "level3":
                continue
            with log() as text:
                model = wrapped(Net(tied=False), policy, level=level)
                loss = model(*batch)
                forward = text[:]
                text.clear()
                loss.backward()
            gathers = [entry for entry in forward if entry[0] == "gather"]
            assert len([e for e in forward if e[0] == "all_reduce"]) <= 2, forward  # of the loss
            if level is None:
                assert not gathers and text == [("bucket", summed)], (policy, text)
                continue
            assert gathers == [("gather", low)] * 8, forward
            scatters = [entry for entry in text if entry[0] == "reduce_scatter"]
            again = [entry for entry in text if entry[0] == "gather"]
            assert scatters == [("reduce_scatter", summed)] * 8, text
            assert set(again) == ({("gather", low)} if level == "level3" else set()), text
            assert len(text) == len(scatters) + len(again)
        with log() as text:
            model = wrapped(Net(tied=False), policy).comm_fusion(allreduce=[4])
            model(*batch).backward()
        assert [e for e in text if e[0] == "bucket"] == [("bucket", summed)] * 2, text
    # What the plan says of it.
    plan = model.plan
    assert (
        sum(c.bytes for c in plan.collectives(0) if c.phase == "gradient")
        == sum(p.numel() for p in model.parameters()) * low.itemsize
    )


def as_fsdp2(rank: int, world: int) -> None:
    """The same losses as `fully_shard` with the same policy, to what bfloat16 rounds; of float32 to its last digits."""
    for policy, stored, within in ((BF16, torch.float32, 2e-2), (EXACT, D, 1e-6)):
        ours = Net(stored, tied=False)
        theirs = copy.deepcopy(ours)
        given = fsdp.MixedPrecisionPolicy(
            param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype, output_dtype=policy.output_dtype
        )
        fsdp.fully_shard(theirs, mesh=dist.device_mesh.init_device_mesh("cpu", (world,)), mp_policy=given)
        model = wrapped(ours, given, level="level3", dataset="data_parallel")
        optimizers = [torch.optim.AdamW(n.parameters(), lr=1e-2) for n in (ours, theirs)]
        part = feeding("data_parallel")
        for batch in batches(stored, 4):
            mine = tuple(map(part, batch))
            loss = model(*mine)
            expected = loss_of(theirs(*mine[:-1]), mine[-1])
            loss.backward(), expected.backward()
            expected = expected.detach().clone()
            dist.all_reduce(expected)
            assert apart(loss, expected / world) < within
            for optimizer in optimizers:
                optimizer.step(), optimizer.zero_grad()
        for p, q in zip(ours.parameters(), theirs.parameters()):
            assert p.dtype == q.dtype and apart(full(p.detach()), full(q.detach())) < max(within, 5e-2 * (stored != D))


def in_pipelines(name: str, rank: int, world: int) -> None:
    for policy, stored in ((EXACT, D), (BF16, torch.float32)):
        for mode, level, recomputed in (
            ("semi_auto", None, False),
            ("data_parallel", "level1", False),
            ("data_parallel", "level3", False),
            ("semi_auto", None, True),  # zero_bubble then computes gradients of weights with those of inputs
        ):
            if ((level is not None or recomputed) and name not in ("1f1b", "zero_bubble")) or (
                policy is BF16 and (level or recomputed or name != "1f1b")
            ):
                continue
            net = Chain(tied=name == "1f1b", skip=True).to(stored)
            one = copy.deepcopy(net)
            for layer in net.layers if recomputed else ():
                sw.recompute(layer)
            model = wrapped(net, policy, mode, level, loss_fn=nn.MSELoss()).pipeline(
                **setting(name, 2 if world == 4 else 4)
            )
            given = [(draw(16, 16, seed=i).to(stored), draw(16, 16, seed=i + 9).to(stored)) for i in range(2)]
            assert_trains_alike(
                model,
                net,
                one,
                policy,
                given,
                max(APART[policy.param_dtype], APART[stored] * 10),
                nn.functional.mse_loss,
                whole=lambda n, x: _of_stages(model.plan, n, x),
            )
            crossing = {t.value.dtype for t in model.plan.transfers if t.kind == "value"}
            assert crossing == {policy.param_dtype}


def _of_stages(plan: sw.PipelinePlan, name: str, x: Tensor) -> Tensor:
    """A parameter, or its gradient, put together from the ranks of its stage."""
    parameter, local = plan.parameters[name], x.to_local() if isinstance(x, DTensor) else x
    out, count = (torch.zeros(parameter.shape, dtype=x.dtype) for _ in range(2))
    if local.numel():
        at = parameter.slice(dist.get_rank())
        out[at], count[at] = local, 1
    dist.all_reduce(out), dist.all_reduce(count)
    return out / count


def micro_batches_add_up_wide(rank: int, world: int) -> None:
    """Gradients of micro-batches are added in the stored type: 512 + 1 is no number of bfloat16."""
    for level in (None, "level1"):
        net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        for layer in net:
            nn.init.eye_(layer.weight)
        model = wrapped(net, BF16, "semi_auto", level, loss_fn=nn.MSELoss(reduction="sum"))
        model.pipeline(stages=2, micro_batches=2, stage_config={"0": 0, "1": 1})
        x = torch.eye(8).repeat(2, 1)
        y = torch.cat([torch.eye(8) + 512, torch.eye(8) + 1])
        model(x, y).backward()
        weight = net[1].weight
        assert torch.equal(_of_stages(model.plan, "1.weight", weight.grad), torch.full((8, 8), -2.0 * 513)), weight.grad


def compiles(rank: int, world: int) -> None:
    made = []
    for compile in (False, "aot_eager"):
        net = Net(D)
        model = wrapped(net, EXACT, level="level1", compile=compile)
        loss = model(*batches(D)[0])
        loss.backward()
        made.append([loss.detach(), *(full(p.grad) for p in net.parameters())])
    assert all(apart(a, b) < 1e-6 for a, b in zip(*made))


def saves(rank: int, world: int, folder: Path) -> None:
    model = wrapped(Net(), BF16, level="level1")
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches(torch.float32, 2):
        model(*batch).backward()
        optimizer.step(), optimizer.zero_grad()
    sw.save_checkpoint(model, optimizer, folder / "run", step=2)
    state = {name: full(p.detach()) for name, p in model.named_parameters()}
    later = model(*batches(torch.float32)[2]).detach()
    if rank == 0:
        torch.save((state, later), folder / "state.pt")


def hybrid(rank: int, world: int) -> None:
    net = Net(D)
    one = copy.deepcopy(net)
    model = wrapped(net, EXACT, "hybrid_parallel", dataset="data_parallel")
    assert_trains_alike(
        model, net, one, EXACT, batches(D, 2), 2e-6, part=feeding("data_parallel"), whole=lambda n, x: full(x)
    )


TRAINED = {
    f"{mode}, {level}, {dataset}, {name}": partial(trains, policy, stored, mode, level, dataset)
    for mode, level, dataset, names in (
        ("data_parallel", None, "data_parallel", ("exact", "bfloat16")),
        ("data_parallel", "level1", "data_parallel", ("exact", "summed in bfloat16")),
        ("semi_auto", None, "full_batch", ("exact", "summed in bfloat16")),
        ("semi_auto", "level3", "full_batch", ("exact", "bfloat16")),
    )
    for name, policy, stored in (
        ("exact", EXACT, D),
        ("bfloat16", BF16, torch.float32),
        ("summed in bfloat16", ALL_BF16, torch.float32),
    )
    if name in names
}
#: Those that need four ranks, for strategies or for stages of several ranks, and one of parts of the parameters; the
#: others take half the time on two.
ON_FOUR = ("data_parallel, level1, data_parallel, exact", *(name for name in TRAINED if name.startswith("semi_auto")))
SCENARIOS: dict[int, dict[str, Callable[[int, int], None]]] = {
    2: {
        "travels": travels,
        "as FSDP2": as_fsdp2,
        "compiles": compiles,
        **{name: run for name, run in TRAINED.items() if name not in ON_FOUR},
        "optimizes": optimizes,
        "kept gradients are wide": kept_gradients_are_wide,
        "hybrid": hybrid,
    },
    4: {
        **{name: TRAINED[name] for name in ON_FOUR},
        "micro-batches add up wide": micro_batches_add_up_wide,
        **{
            f"pipeline, {name}": partial(in_pipelines, name) for name in ("1f1b", "gpipe", "interleaved", "zero_bubble")
        },
    },
}


@lru_cache
def results(world: int) -> dict[str, str | None]:
    """The message of every scenario on the first rank that it fails on."""
    if "compiles" in SCENARIOS[world]:  # what a compiled forward and backward import is imported here, not in each rank
        torch.compile(torch.relu, backend="aot_eager")(torch.ones(1, requires_grad=True))
    reported = run_ranks(run_scenarios, world, SCENARIOS[world])
    return {
        name: next((f"rank {r}:\n{of[name]}" for r, of in enumerate(reported) if of[name] is not None), None)
        for name in SCENARIOS[world]
    }


@pytest.mark.long
@pytest.mark.parametrize("world, name", [(world, name) for world, some in SCENARIOS.items() for name in some])
def test_on_ranks(world: int, name: str) -> None:
    failed = results(world)[name]
    assert failed is None, failed


@pytest.mark.long
def test_checkpoints_are_read_on_another_number_of_devices(tmp_path) -> None:
    """Saved by two ranks, read by four devices in this process: the stored weights, to the bit."""
    run_ranks(saves, 2, tmp_path)
    state, later = torch.load(tmp_path / "state.pt")
    model = parallel(Net(), loss_of, devices=4, mode="data_parallel", mixed_precision=BF16)
    model.hsdp(threshold=0, optimizer_level="level3")
    optimizer = torch.optim.AdamW(model.parameters())
    sw.load_checkpoint(model, optimizer, tmp_path / "run")
    loss = model(*batches(torch.float32)[2])
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32 and torch.equal(p, state[name]), name
        assert not torch.equal(p, p.bfloat16().float()), name
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    assert apart(loss, later) < APART[torch.bfloat16]
