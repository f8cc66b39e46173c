"""Communication beside computation on libraries: what runs is the schedule of the plan.

Order and memory are of rank 3 of 8 on torch's "fake" group. Numbers are of two and of four Gloo processes that take the
same path.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collective_log import CollectiveLog, collective_log, rank_of_eight
from gpt import GPT, mark
from held_bytes import Alive
from ranks import all_passed, run_ranks, run_scenarios
from small_networks import D
from torch import Tensor, nn

import shardwright as sw
from shardwright.cost.communication_schedule import CommunicationSchedule, block_of
from shardwright.partition.local_program import Redistribute
from shardwright.redistribution import redistribution
from shardwright.redistribution.collective_kinds import CollectiveKind
from shardwright.runtime.distributed.collectives import arrangements
from shardwright.runtime.distributed.process_groups import ProcessGroups
from shardwright.runtime.distributed.rank_executor import BoundRedistribute
from shardwright.runtime.distributed.scheduled_collectives import BEGINNINGS
from shardwright.torch_private import local_tensor

LAYERS, BATCH, LENGTH, VOCABULARY = 4, 16, 8, 32
FEW = 2  # layers of the models that train: each has a block before it and one behind it, as each of four has
LEVELS = ("level1", "level2", "level3")
PLANS = ("data_parallel", "marks", *LEVELS, "level1 recompute", "level3 recompute", "level1 halves", "level3 halves")


class TokenLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = sw.Operator(F.cross_entropy)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.cross_entropy(logits.flatten(0, 1), target.flatten())


def gpt(layers: int = LAYERS) -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=VOCABULARY, length=LENGTH, layers=layers, width=32, heads=8).to(D)


def tokens(seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randint(VOCABULARY, (BATCH, LENGTH)), torch.randint(VOCABULARY, (BATCH, LENGTH))


def wrapped(net: GPT, plan: str, world: int, **given: Any) -> sw.AutoParallel:
    """data_parallel, marks (2 replicas of a tensor-parallel model), or a level of hsdp, over all or over two."""
    loss = TokenLoss()
    if plan.endswith("recompute"):
        for block in net.blocks:
            sw.recompute(block)
    if plan == "marks":
        mark(net, loss, 2, world // 2)
    mode = "semi_auto" if plan == "marks" else "data_parallel"
    made = sw.AutoParallel(net, loss, parallel_mode=mode, **given)
    if plan.partition(" ")[0] in LEVELS:
        size = 2 if plan.endswith("halves") else -1
        made.hsdp(threshold=0, shard_size=size, optimizer_level=plan.partition(" ")[0])
    return made.dataset_strategy("full_batch")


Logs = tuple[CollectiveLog, CollectiveLog]


def logged(model: Any, *inputs: Tensor) -> Logs:
    """The collectives of a forward and of its backward."""
    with collective_log() as forward:
        loss = model(*inputs)
    with collective_log() as backward:
        loss.backward()
    return forward, backward


def logs(plan: str, fusion: float | None = None, **given: Any) -> tuple[CollectiveLog, CollectiveLog, sw.AutoParallel]:
    """The same of the second step, on rank 3 of 8."""
    net, batch = gpt(), tokens()
    with rank_of_eight(rank=3):
        model = wrapped(net, plan, 8, **given)
        if fusion is not None:
            model.comm_fusion(allreduce=fusion)
        model(*batch).backward()
        return (*logged(model, *batch), model)


Events = list[tuple[str, str, int]]


def ran(log: CollectiveLog) -> Events:
    """("issue" or "wait", kind, bytes), in order."""
    return [(action, one.kind, one.bytes) for action, one in log.events]


def scheduled(schedule: CommunicationSchedule, back: bool) -> Events:
    """The same, as the schedule has it. A permute is an all_to_all to the process group."""
    out = []
    for _, action, number in schedule.order:
        message = schedule.messages[number]
        if (message.issue >= schedule.forward) == back:
            kind = "all_to_all" if message.kind == "permute" else str(message.kind)
            out.append((action, kind, message.bytes))
    return out


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_what_runs_is_the_schedule(plan: str) -> None:
    """From the first step on, every collective is issued and waited for in the order of the schedule."""
    net, batch = gpt(), tokens()
    with rank_of_eight(rank=3):
        model = wrapped(net, plan, 8)
        for _ in range(2):
            forward, backward = logged(model, *batch)
            assert ran(forward) == scheduled(model.plan.schedule, False)
            assert ran(backward) == scheduled(model.plan.schedule, True)


def test_a_redistribution_that_does_nothing_is_not_in_the_program() -> None:
    """Nor is a step of one: each that is there has something to do in the forward or in the backward."""
    net, batch = gpt(), tokens()
    with rank_of_eight(rank=3):
        model = wrapped(net, "marks", 8)
        model(*batch)
        bound = next(iter(model._programs.values())).body.module.children()
    moves = [part for part in bound if isinstance(part, BoundRedistribute)]
    assert len(moves) >= 10 and all(move.forward_steps or move.backward_steps for move in moves)


@pytest.mark.parametrize("plan", ["level1", "level3", "level3 recompute", "level3 halves"])
@pytest.mark.parametrize("allowance", [0, "60KB", "200KB"])
def test_with_an_allowance_too(plan: str, allowance: Any) -> None:
    forward, backward, model = logs(plan, comm_memory=allowance)
    assert ran(forward) == scheduled(model.plan.schedule, False)
    assert ran(backward) == scheduled(model.plan.schedule, True)


def test_buckets_of_the_users_size_are_those_of_the_schedule() -> None:
    _, backward, model = logs("data_parallel", fusion=0.05)
    program = next(iter(model._programs.values()))
    schedule = program.body.schedule
    assert len(list(schedule.of("sum"))) >= 3 > len(list(model.plan.schedule.of("sum")))
    assert ran(backward) == scheduled(schedule, True)


@pytest.mark.parametrize("allowance", [0, None])
def test_sums_in_a_wider_dtype_within_an_allowance(allowance: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).bfloat16()
    x = torch.randn(64, 64).bfloat16()
    with rank_of_eight(rank=3):
        policy = sw.MixedPrecision(reduce_dtype=torch.float32)
        model = sw.AutoParallel(
            net, nn.MSELoss(), parallel_mode="data_parallel", mixed_precision=policy, comm_memory=allowance
        )
        model.dataset_strategy("full_batch")(x, x).backward()
        forward, backward = logged(model, x, x)
    schedule = model.plan.schedule
    assert ran(forward) == scheduled(schedule, False) and ran(backward) == scheduled(schedule, True)
    assert {one.dtype for one in backward.sent if one.kind == "all_reduce"} == {torch.float32}
    early = [message for _, message in schedule.of("sum") if message.wait < schedule.end]
    assert bool(early) == (allowance == 0)


class Towers(nn.Module):
    """Two branches; the result of the first is redistributed beside the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32, bias=False, dtype=D), nn.Linear(16, 32, bias=False, dtype=D)
        self.join = sw.Operator(torch.add)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = self.first(x)
        return self.join(torch.sin(torch.tanh(self.second(y))), a)


#: From the rows of the batch (an all-to-all, which is its own transpose), or from terms of a sum (a reduce-scatter, and
#: an all-gather back; an all-reduce, and nothing back).
BRANCHES = {
    "all_to_all": (lambda n: ((n, 1), (1, 1)), lambda n: (1, n)),
    "reduce_scatter": (lambda n: ((1, n), (1, n)), lambda n: (1, n)),
    "all_reduce": (lambda n: ((1, n), (1, n)), lambda n: (1, 1)),
    "all_gather": (lambda n: ((n, 1), (1, 1)), lambda n: (1, 1)),
}


def towers(kind: str, world: int, net: Towers | None = None, **given: Any) -> sw.AutoParallel:
    net = Towers() if net is None else net
    branch, join = BRANCHES[kind]
    sw.shard(net.first, branch(world))
    sw.shard(net.second, branch(world))
    net.join.shard((join(world),) * 2)
    return sw.AutoParallel(net, nn.MSELoss(), **given).dataset_strategy("full_batch")


def branches() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(2, 16, 16, dtype=D).requires_grad_().unbind()
    return x.detach().requires_grad_(), y.detach().requires_grad_(), torch.randn(16, 32, dtype=D)


@pytest.mark.parametrize("kind", BRANCHES)
def test_a_redistribution_travels_beside_another_branch(kind: str) -> None:
    with rank_of_eight(rank=3):
        model = towers(kind, 8)
        model(*branches()).backward()
        forward, backward = logged(model, *branches())
    schedule = model.plan.schedule
    assert schedule.splits
    assert ran(forward) == scheduled(schedule, False) and ran(backward) == scheduled(schedule, True)
    moved = [one for one in forward.sent if one.kind == kind and one.waited is not None]
    assert max(one.waited - one.issued for one in moved) >= 3  # a product, tanh and sin


# -- counts ------------------------------------------------------------------------------------------------------------


def test_sums_of_gradients_are_waited_for_at_the_end_alone() -> None:
    _, backward, _ = logs("data_parallel", fusion=0.05)
    sums = [each for each in backward.sent if each.kind == "all_reduce" and each.bytes > LENGTH * 32 * 8]
    assert len(sums) >= 3
    last_issued = max(each.issued for each in sums)
    assert all(each.waited is not None and each.waited >= last_issued for each in sums)
    assert sums[0].issued < backward.operators // 2  # the first is issued while the backward computes


def test_biases_of_row_parallel_layers_are_in_the_buckets() -> None:
    """Such a bias is added by one rank of its group, so that an operator reads its device; a gradient has one sum."""
    _, backward, model = logs("marks")
    trained = {name for name, _ in model.named_parameters()} - {"positions.weight"}  # its result is summed
    sums = [message for _, message in model.plan.schedule.of("sum")]
    assert {member.name for message in sums for member in message.members} == trained
    assert len(sums) == len({message.digits for message in sums})
    at_once = [s for s in backward.sent if s.kind == "all_reduce" and s.waited == s.issued]
    assert not at_once


def test_a_bucket_of_a_library_has_25_mebibytes_on_any_number_of_ranks() -> None:
    _, backward, model = logs("data_parallel")
    assert sum(p.numel() for p in model.parameters()) * 8 < 25 << 20
    assert [each.kind for each in backward.sent if each.bytes > LENGTH * 32 * 8] == ["all_reduce"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_block_has_one_gather_and_one_scatter(level: str) -> None:
    forward, backward, model = logs(level)
    blocks = {block_of(name) for name, _ in model.named_parameters()}
    assert forward.counts()["all_gather"] == len(blocks)
    assert backward.counts()["all_gather"] <= (len(blocks) if level == "level3" else 0)
    scatters = [each for each in backward.sent if each.kind == "reduce_scatter"]
    assert len(scatters) <= len(blocks)
    assert sum(each.bytes for each in scatters) >= 8 * 0.9 * sum(p.numel() for p in model.parameters())
    last_issued = max(each.issued for each in scatters)
    assert all(each.waited is not None and each.waited >= last_issued for each in scatters)
    assert scatters[0].issued < backward.operators // 2
    # A layer's weights travel while the layer before computes, forward and backward.
    for log in (forward, backward):
        gathers = [each for each in log.sent if each.kind == "all_gather"]
        layers = [each for each in gathers if 2 * each.bytes > max(g.bytes for g in gathers)]
        assert len(layers) == (LAYERS if log is forward or level == "level3" else 0)
        assert all(layer.waited is not None and layer.waited - layer.issued > 20 for layer in layers[1:])


# -- memory ------------------------------------------------------------------------------------------------------------


def peak(plan: str, comm_memory: Any) -> tuple[int, sw.Plan]:
    """The most bytes that a step holds beyond what stands before it, on rank 3 of 8."""
    net, batch = gpt(), tokens()
    with rank_of_eight(rank=3):
        model = wrapped(net, plan, 8, comm_memory=comm_memory)

        def step() -> None:
            model(*batch).backward()
            for parameter in model.parameters():
                parameter.grad = None

        step()
        with Alive() as alive:
            step()
            alive.peak = before = alive.now()
            model(*batch).backward()
            return alive.peak - before, model.plan


@pytest.mark.parametrize("plan", ["level1", "level3", "level3 recompute"])
def test_measured_memory_stays_within_the_allowance(plan: str) -> None:
    held, made = peak(plan, 0)
    assert made.peak == made.unscheduled.peak
    raised = []
    for allowance in (50_000, None):
        more, made = peak(plan, allowance)
        raised.append(more - held)
        assert more - held <= made.schedule.allowance
    assert raised[-1] > 40_000  # messages are under way at the peak


@pytest.mark.parametrize("allowance", [0, 50_000, None])
def test_a_bucket_of_sums_is_counted_with_the_copy_of_its_gradients(allowance: Any) -> None:
    held, made = peak("data_parallel", allowance)
    standing = made.memory(3)
    assert held <= made.peak - standing["parameters"] - standing["optimizer"]


# -- numbers -----------------------------------------------------------------------------------------------------------


def as_a_library() -> None:
    """Make process groups of this process as on NCCL: no exchanges of Gloo's, no shared memory."""
    made = ProcessGroups.__init__

    def init(self: ProcessGroups, *args: Any, **given: Any) -> None:
        made(self, *args, **(given | {"exchanges": False, "share": False}))

    ProcessGroups.__init__ = init


#: Steps of two backwards, the first without sums, and steps of one: either after either, and the former first of all.
TURNS = (True, False, False, True)
WITHIN = (0, "60KB")  # of memory for messages


def same_gradients(model: sw.AutoParallel, one: nn.Module, plan: str, rank: int) -> None:
    """Each rank compares its part of each gradient with that part of the gradient on one device: nothing is sent."""
    for (name, p), q in zip(one.named_parameters(), model.net.parameters(), strict=True):
        wanted = p.grad[model.plan.parameters[name].slice(rank)]
        torch.testing.assert_close(local_tensor(q.grad), wanted, rtol=1e-8, atol=1e-12, msg=f"{plan}: {name}")


def steps(plan: str, turns: tuple[bool, ...], **given: Any) -> Any:
    """A scenario of these steps; each accumulates the gradients of two batches, or has one batch."""

    def scenario(rank: int, world: int) -> None:
        one, net = gpt(FEW), gpt(FEW)
        loss_one, model = TokenLoss(), wrapped(net, plan, world, **given)
        optimizers = [torch.optim.AdamW(n.parameters(), 1e-2) for n in (one, net)]
        for turn, accumulate in enumerate(turns):
            for part in range(2 if accumulate else 1):
                x, y = tokens(2 * turn + part)
                wanted = loss_one(one(x), y)
                wanted.backward()
                if accumulate and part == 0:
                    with model.no_sync():
                        found = model(x, y)
                        found.backward()
                else:
                    found = model(x, y)
                    found.backward()
                torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-9, atol=1e-12)
                with torch.no_grad():  # gathered, and never asked for by a backward
                    assert abs(model(x, y).item() - wanted.item()) < 1e-9 or accumulate
            same_gradients(model, one, plan, rank)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    return scenario


def two_backwards(level: str) -> Any:
    """Two losses in one backward, a second backward through one graph, a backward that ends in an error."""

    def scenario(rank: int, world: int) -> None:
        one, net = gpt(FEW), gpt(FEW)
        loss_one, model = TokenLoss(), wrapped(net, level, world)
        pairs = [tokens(3), tokens(4)]
        (loss_one(one(pairs[0][0]), pairs[0][1]) + 3 * loss_one(one(pairs[1][0]), pairs[1][1])).backward()
        first, second = (model(x, y) for x, y in pairs)
        (first + second).backward(retain_graph=True)
        second.backward()
        third = model(*pairs[1])
        with pytest.raises(RuntimeError, match="on purpose"):
            third.register_hook(lambda gradient: (_ for _ in ()).throw(RuntimeError("on purpose")))
            third.backward()
        model(*pairs[1]).backward()
        same_gradients(model, one, level, rank)

    return scenario


def branched(kind: str) -> Any:
    def scenario(rank: int, world: int) -> None:
        one, inputs, given = Towers(), branches(), branches()
        model = towers(kind, world)
        for _ in range(2):
            wanted = nn.functional.mse_loss(one(*inputs[:2]), inputs[2])
            wanted.backward()
            found = model(*given)
            found.backward()
            torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-10, atol=1e-12)
        assert model.plan.schedule.splits
        for p, q in zip((*one.parameters(), *inputs[:2]), (*model.parameters(), *given[:2])):
            gradient = q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad
            torch.testing.assert_close(gradient, p.grad, rtol=1e-9, atol=1e-12, msg=kind)
        with torch.no_grad():
            torch.testing.assert_close(model(*given), wanted.detach(), rtol=1e-10, atol=1e-12)

    return scenario


def four(plan: str) -> bool:
    """Some plans need four ranks; one that does not is run by four all the same."""
    return plan in ("marks", "level2") or plan.endswith("halves")


ON_FOUR = {plan: steps(plan, TURNS) for plan in PLANS if four(plan)}
ON_FOUR |= {f"level3 halves within {size}": steps("level3 halves", (False,) * 3, comm_memory=size) for size in WITHIN}
ON_FOUR |= {f"branches, {kind}": branched(kind) for kind in BRANCHES}
ON_TWO = {plan: steps(plan, TURNS) for plan in PLANS if not four(plan)}
ON_TWO |= {
    f"{level} within {size}": steps(level, (False,) * 3, comm_memory=size) for level in LEVELS for size in WITHIN
}
ON_TWO |= {f"two backwards, {level}": two_backwards(level) for level in ("level1", "level3")}


def on_a_library(rank: int, world: int) -> Any:
    as_a_library()
    return run_scenarios(rank, world, ON_FOUR if world == 4 else ON_TWO)


@pytest.mark.parametrize("world", [4, 2])
def test_numbers_are_those_of_one_device(world: int) -> None:
    all_passed(run_ranks(on_a_library, world))


# -- halos -------------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Two convolutions of one result whose height is cut: the second halo exchange could travel beside the first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.small = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.large = nn.Conv2d(8, 8, 5, padding=2)
        for layer in (self.stem, self.small, self.large):
            sw.shard(layer, ((1, 1, 8, 1), (1, 1, 1, 1), (1,)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        made: Tensor = self.small(y) + self.large(y)
        return made


def test_halo_exchanges_run_in_one_piece_beside_other_work() -> None:
    with rank_of_eight():
        model = sw.AutoParallel(nn.Sequential(Branches(), Branches())).dataset_strategy("full_batch")
        made = model(torch.randn(8, 8, 64, 64))
        made.sum().backward()
    schedule, instructions = model.plan.schedule, model.plan.program.instructions
    halos = [
        k for k, i in enumerate(instructions) if isinstance(i, Redistribute) and any(s.halo for s in i.forward.steps)
    ]
    assert len(halos) >= 4 and not set(halos) & set(schedule.splits)


def test_every_collective_that_travels_alone_has_a_beginning() -> None:
    assert set(BEGINNINGS) == {kind for kind in CollectiveKind if kind.travels_alone and kind.source is not None}


# -- gradients of sums -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cut", "shape"), [("rows", (8, 64)), ("columns", (64, 8))])
def test_pieces_to_send_are_contiguous_where_a_gradient_is_one_element_expanded(
    cut: str, shape: tuple[int, int]
) -> None:
    layout = sw.Layout((8,), ("a",))
    rows, columns = layout("a", "None"), layout("None", "a")
    step = redistribution(*((rows, columns) if cut == "rows" else (columns, rows))).steps[0]
    pieces, _ = arrangements(step.geometry(shape))
    x = torch.ones(()).expand(shape)
    sent = pieces(x)
    assert not x.is_contiguous() and sent.is_contiguous()
    assert sent.untyped_storage().nbytes() == x.numel() * x.element_size()
