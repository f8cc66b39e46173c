"""Recomputation: the same losses and gradients, bit for bit, with less kept between forward and backward."""

from __future__ import annotations

import copy
import functools
import gc
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_device import assert_as_one_device, close
from ranks import run_ranks
from small_networks import Apply, D, draw, labels
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import shardwright as sw
from shardwright.report.ir_dump import begin_text, execute_text
from shardwright.report.tables import explain
from shardwright.runtime.distributed.shared_memory import SameHost
from shardwright.runtime.local import local_executor

X, T = draw(16, 8), labels(16)
GIVEN = draw(16, 8).requires_grad_()  # without which torch's reentrant checkpoints lose the weights' gradients
CROSS_ENTROPY = nn.CrossEntropyLoss()
aten = torch.ops.aten


class Block(nn.Module):
    """A norm, two products cut in columns and in rows, a residual."""

    def __init__(self, devices: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        batch, width = min(devices, 2), max(devices // 2, 1)
        self.first = sw.shard(F.linear, ((batch, 1), (width, 1), (width,)))
        self.act = sw.Operator(F.gelu)
        self.second = sw.shard(F.linear, ((batch, width), (1, width), (1,)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.first(self.norm(x), self.up.weight, self.up.bias))
        return x + self.second(F.dropout(y, 0.25, self.training), self.down.weight, self.down.bias)


class Attention(nn.Module):
    """Heads as one operator, or written out with transposed views."""

    def __init__(self, written_out: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.written_out = nn.Linear(8, 24), nn.Linear(8, 8), written_out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.reshape(4, 4, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = (
            torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
            if self.written_out
            else F.scaled_dot_product_attention(q, k, v, is_causal=True)
        )
        return self.out(y.transpose(1, 2).reshape(16, 8))


class Network(nn.Module):
    def __init__(self, devices: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(devices), Attention(False), Block(devices), Attention(True)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(x))


def network(devices: int) -> Network:
    torch.manual_seed(3)
    return Network(devices).to(D)


def wrapped(net: nn.Module, devices: int, loss_fn: Any = CROSS_ENTROPY, **options: Any) -> sw.AutoParallel:
    sw.init(devices=devices)
    return sw.AutoParallel(net, loss_fn, **options).dataset_strategy("full_batch")


def trained(net: nn.Module, devices: int, **options: Any) -> tuple[list[Tensor], sw.AutoParallel]:
    """Two steps: losses, gradients and parameters."""
    model, out = wrapped(net, devices, **options), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    torch.manual_seed(11)
    for seed in range(2):
        loss = model(draw(16, 8, seed=seed), labels(16, seed=seed))
        loss.backward()
        out += [loss.detach().clone(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return out + [x.detach().clone() for x in net.state_dict().values()], model


def same_bits(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b) > 2
    for i, (x, y) in enumerate(zip(a, b)):
        assert torch.equal(x, y), i


def blocks(net: Network, **options: Any) -> None:
    for block in net.blocks:
        assert sw.recompute(block, **options) is block


def operators(net: Network) -> None:
    for block in net.blocks:
        if isinstance(block, Block):
            assert sw.recompute(block.act) is block.act
            sw.recompute(block.norm)


WAYS: dict[str, tuple[Callable[[Network], Any], dict[str, Any]]] = {
    "modules": (blocks, {}),
    "results of collectives kept": (lambda net: blocks(net, mp_comm_recompute=False), {}),
    "the whole": (sw.recompute, {}),
    "operators": (operators, {}),
    "a policy": (lambda net: None, {"recompute": lambda op: op.kind not in ("linear", "matmul")}),
    "what is saved": (lambda net: None, {"recompute": [aten.linear, aten.matmul.default]}),
    "modules but for products": (blocks, {"recompute": lambda op: "save" if op.kind == "linear" else None}),
}


@pytest.mark.parametrize(
    ("devices", "random", "ways"),
    [(2, "exact", [*WAYS][:4]), (4, "fast", [*WAYS]), (8, "exact", [*WAYS][3:])],
    ids=["2-exact", "4-fast", "8-exact"],
)
def test_nothing_changes(devices: int, random: str, ways: list[str]) -> None:
    expected, plain = trained(network(devices), devices, random=random)
    for way in ways:
        mark, options = WAYS[way]
        net = network(devices)
        mark(net)
        got, model = trained(net, devices, random=random, **options)
        same_bits(got, expected)
        memory, before = model.plan.memory(0), plain.plan.memory(0)
        assert memory["activations"] < before["activations"] and memory["recomputed"] > 0, way
        assert "recomputed" not in before and not plain.plan.regions
        assert model.plan.fingerprint != plain.plan.fingerprint


def test_as_one_device() -> None:
    for devices in (2, 4, 8):
        net = network(devices).eval()  # dropout apart, of which one device draws torch's own numbers
        blocks(net)
        assert_as_one_device(net, (X, T), (draw(16, 8, seed=1), T), loss_fn=CROSS_ENTROPY, devices=devices)


# -- what is kept ------------------------------------------------------------------------------------------------------


class _Made(TorchDispatchMode):
    """The memory of everything that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor):
                memory = StorageWeakRef(x.untyped_storage())
                self.made.setdefault(memory.cdata, (memory, x.untyped_storage().nbytes()))
        return out

    def alive(self, without: Iterable[Tensor]) -> int:
        known = {x.untyped_storage()._cdata for x in without}
        return sum(size for key, (memory, size) in self.made.items() if key not in known and not memory.expired())


def kept(net: nn.Module, devices: int, *inputs: Tensor, **options: Any) -> tuple[int, sw.Plan]:
    """Bytes that live between a forward and its backward, inputs and parameters aside."""
    model = wrapped(net, devices, **options)
    model(*inputs).backward()
    with _Made() as made:
        loss = model(*inputs)
    alive = made.alive([*inputs, *net.parameters(), *net.buffers(), loss])
    loss.backward()
    return alive, model.plan


class Chain(nn.Module):
    """All values cut over all devices, and each saved once, by an operator that saves nothing else."""

    def __init__(self, mark: Callable[[nn.Module], Any] = lambda m: m) -> None:
        super().__init__()
        self.parts = nn.ModuleList([mark(nn.Sequential(nn.SiLU(), nn.GELU(), nn.Softplus())) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(torch.mul(x, 2.0))
        return x


@pytest.mark.parametrize("devices", [2, 8])
def test_memory_falls_as_planned(devices: int) -> None:
    x, t = draw(256, 64).requires_grad_(), draw(256, 64, seed=1)
    before, plain = kept(Chain(), devices, x, t, loss_fn=F.mse_loss)
    after, plan = kept(Chain(sw.recompute), devices, x, t, loss_fn=F.mse_loss)
    # A part keeps its input, which SiLU saves, and drops the inputs of GELU and Softplus.
    value = 256 * 64 * 8
    assert before - after == 4 * value
    assert devices * (plain.memory(0)["activations"] - plan.memory(0)["activations"]) == 4 * value
    assert devices * plan.memory(0)["recomputed"] == 2 * value


@pytest.mark.parametrize("devices", [1, 4])
def test_memory_of_models_falls(devices: int) -> None:
    before = kept(network(devices), devices, X, T)[0]
    figures = {}
    for way, (mark, options) in WAYS.items():
        net = network(devices)
        mark(net)
        figures[way] = kept(net, devices, X, T, **options)[0] / before
    assert figures["modules"] < 0.6 and figures["the whole"] < 0.5, figures
    assert all(share < 0.95 for share in figures.values()), figures
    assert figures["modules"] <= figures["modules but for products"], figures


def test_results_of_a_single_operator_are_dropped_where_others_save_them() -> None:
    def net(mark: Callable = lambda f: sw.Operator(f)) -> Apply:
        return Apply(lambda m, x: m.act(x.tanh()).reshape(32, 32) @ m.v, v=nn.Parameter(draw(32, 8)), act=mark(F.silu))

    x, t = draw(64, 16).requires_grad_(), draw(32, 8)
    before = kept(net(), 4, x, t, loss_fn=F.mse_loss)[0]
    after, plan = kept(net(sw.recompute), 4, x, t, loss_fn=F.mse_loss)
    assert before - after == 64 * 16 * 8  # the product saves a view of it
    assert [region.path for region in plan.regions] == ["act"]


class Exponential(torch.autograd.Function):
    """A function that saves a tensor which is neither an input nor an output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.exp())
        return x.exp() - 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


sw.rule(Exponential, "... -> ...")


def test_what_an_operator_saves_of_its_own_is_dropped() -> None:
    def net(mark: Callable) -> Apply:
        return Apply(lambda m, x: m.part(x * 2) * 2, part=mark(Apply(lambda m, x: Exponential.apply(x))))

    x, t = draw(64, 16).requires_grad_(), draw(64, 16)
    before = kept(net(lambda part: part), 4, x, t, loss_fn=F.mse_loss)[0]
    after = kept(net(sw.recompute), 4, x, t, loss_fn=F.mse_loss)[0]
    assert before == after  # its input in the place of what it saved
    both = Apply(lambda m, x: m.part(x * 2) * 2, part=sw.recompute(Apply(lambda m, x: Exponential.apply(torch.sin(x)))))
    plain = Apply(lambda m, x: Exponential.apply(torch.sin(x * 2)) * 2)
    assert kept(plain, 4, x, t, loss_fn=F.mse_loss)[0] - kept(both, 4, x, t, loss_fn=F.mse_loss)[0] == 64 * 16 * 8
    assert_as_one_device(both, (GIVEN,), devices=4)


def test_no_graph_is_held_for_ever() -> None:
    net = network(4)
    blocks(net, mp_comm_recompute=False)
    model = wrapped(net, 4)
    model(X, T)
    with _Made() as made:
        loss = model(X, T)
        del loss  # no backward
    gc.collect()
    assert made.alive([*net.parameters(), X, T]) == 0


def test_memory_goes_when_the_graph_does() -> None:
    left = []
    for mark in (lambda net: None, blocks):
        net = network(4)
        mark(net)
        model = wrapped(net, 4)
        model(X, T)  # no backward
        with _Made() as made:
            loss = model(X, T)
            during = made.alive(net.parameters())
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            del loss
        gc.collect()
        left.append(made.alive([*net.parameters(), *gradients, X, T]))
        assert left[-1] < during / 4
    assert left[0] == left[1]


# -- what is sent again ------------------------------------------------------------------------------------------------


def test_collectives_of_the_backward_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, sent = local_executor.convert_shards, []

    def noted(redistribution: Any, shards: Any, *rest: Any) -> Any:
        sent.extend(step.kind for step in redistribution.steps if step.communicates)
        return plain(redistribution, shards, *rest)

    monkeypatch.setattr(local_executor, "convert_shards", noted)
    for way, (mark, options) in WAYS.items():
        net = network(4).eval()
        mark(net)
        model = wrapped(net, 4, **options)
        loss = model(X, T)
        planned = model.plan.collectives(0)
        assert sent == [c.op for c in planned if c.phase in ("forward", "storage") and not c.again]
        sent.clear()
        loss.backward()
        # Sums of parameters' gradients that stand alone are autograd's own in one process.
        backward = [c.op for c in planned if (c.phase == "backward" or c.again) and c.cause != "parameter"]
        extra = [c.op for c in planned if c.phase == "gradient"]
        for op in backward:
            sent.remove(op)
        assert all(op in extra for op in sent), way
        again = [c for c in planned if c.again]
        assert bool(again) == (way not in ("results of collectives kept",)), way
        assert model.plan.sent == sum(c.sent for c in planned)
        sent.clear()


def test_what_reads() -> None:
    net = network(4)
    blocks(net)
    plan = sw.plan(net, (X,), CROSS_ENTROPY, T, devices=4)
    text = execute_text(plan, 1)
    backward = text[text.index("# backward") :]
    assert text.count("is computed again") == 4 == len(plan.regions)
    assert "# blocks.3 is computed again, for the backward of " in backward
    again = [line for line in backward.splitlines() if " = gelu(" in line]
    assert len(again) == 2 and again[0] != next(line for line in text.splitlines() if " = gelu(" in line)
    assert "recomputed" not in begin_text(plan, 1)
    table = io.StringIO()
    explain(plan, table, 240)
    assert "recomputed in the backward: blocks.{0, 2} (" in table.getvalue()
    assert sum("recomputed " in line for line in table.getvalue().splitlines()) > len(plan.regions)


def optimizer_parallel(level: str, mark: Callable[[Network], Any]) -> tuple[list[Tensor], int, sw.Plan]:
    """Loss and gradients, bytes between forward and backward, the plan."""
    net = network(4)
    mark(net)
    model = wrapped(net, 4, parallel_mode="data_parallel").hsdp(threshold=0, optimizer_level=level)
    model(X, T).backward()  # makes the program: what a capture leaves to the collector of garbage is not counted
    net.zero_grad()
    torch.manual_seed(5)
    with _Made() as made:
        loss = model(X, T)
    alive = made.alive([X, T, loss, *net.parameters()])
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.parameters())], alive, model.plan


def test_gathered_weights() -> None:
    for level in ("level1", "level3"):
        expected, _, plain = optimizer_parallel(level, lambda net: None)
        bits, held, kept_ = optimizer_parallel(level, blocks)
        same_bits(bits, expected)
        again = functools.partial(blocks, parallel_optimizer_comm_recompute=True)
        bits, less, plan = optimizer_parallel(level, again)
        same_bits(bits, expected)
        gathers = [c for c in plan.collectives(0) if c.again and c.phase == "storage"]
        assert {c.op for c in gathers} == {"all_gather"} and len(gathers) > 10
        if level == "level1":
            assert not any(c.again for c in (*plain.collectives(0), *kept_.collectives(0)))
            # In one process a gathered weight is a view of the whole one, kept or not.
            assert (
                less == held and plan.memory(0)["gathered"] < kept_.memory(0)["gathered"] == plain.memory(0)["gathered"]
            )


# -- how it is asked for -----------------------------------------------------------------------------------------------


def regions(f: Callable, *inputs: Tensor, **held: Any) -> list[list[str]]:
    """The operators of each region, of a function of a module with a weight `w`."""
    plan = sw.plan(Apply(f, **held), inputs or (X,), devices=4)
    return [[plan.operator(name).op for name in region.operators] for region in plan.regions]


def twice(m: Apply, x: Tensor) -> Tensor:
    return m.part(torch.tanh(m.part(x)))


def test_calls_are_regions_of_their_own() -> None:
    inner = sw.recompute(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8)).to(D))
    part = ["linear", "sigmoid", "linear"]
    assert regions(twice, part=inner) == [part, part]
    assert regions(twice, part=sw.recompute(nn.Sequential(inner, nn.SiLU()))) == [[*part, "silu"]] * 2
    net = Apply(twice, part=inner)
    assert_as_one_device(net, (X,), (X,))
    assert len(wrapped(copy.deepcopy(net), 4, None)(X).grad_fn.name()) > 0


def body(m: Apply, x: Tensor) -> Tensor:
    return torch.sigmoid(torch.tanh(x @ m.w) @ m.w)


CHECKPOINTS: dict[str, Callable[[Apply, Tensor], Tensor]] = {
    "reentrant": lambda m, x: checkpoint(lambda y: body(m, y), x, use_reentrant=True) @ m.w,
    "not reentrant": lambda m, x: checkpoint(functools.partial(body, m), x, use_reentrant=False) @ m.w,
    "without arguments": lambda m, x: checkpoint(lambda: body(m, x), use_reentrant=False) @ m.w,
    "keyword arguments": lambda m, x: checkpoint(lambda *, y: body(m, y), y=x, use_reentrant=False) @ m.w,
    "by its module": lambda m, x: torch.utils.checkpoint.checkpoint(body, m, x, use_reentrant=False) @ m.w,
    "nested": lambda m, x: (
        checkpoint(lambda y: checkpoint(body, m, y, use_reentrant=False), x, use_reentrant=False) @ m.w
    ),
}


@pytest.mark.parametrize("f", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_checkpoints_become_regions(f: Callable) -> None:
    assert regions(f) == [["matmul", "tanh", "matmul", "sigmoid"]]
    net, plain = Apply(f), Apply(lambda m, x: body(m, x) @ m.w)
    for devices in (2, 8):
        assert_as_one_device(copy.deepcopy(net), (GIVEN,), (GIVEN,), devices=devices)
    x, t = draw(256, 8).requires_grad_(), draw(256, 8)
    # The region keeps x; it drops tanh, which two save, and the sigmoid's own is used outside.
    assert kept(plain, 4, x, t, loss_fn=F.mse_loss)[0] - kept(net, 4, x, t, loss_fn=F.mse_loss)[0] >= 256 * 8 * 8
    assert torch.utils.checkpoint.checkpoint is checkpoint


def test_sequential_checkpoints() -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))).to(D)
    for reentrant in (True, False):

        def f(m: Apply, x: Tensor, reentrant: bool = reentrant) -> Tensor:
            return checkpoint_sequential(m.layers, 2, x, use_reentrant=reentrant)

        assert regions(f, layers=layers) == [["linear", "tanh"] * 2]  # torch does not checkpoint the last segment
        assert_as_one_device(Apply(f, layers=copy.deepcopy(layers)), (GIVEN,))


def test_policies_of_torch() -> None:
    def saves(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op == aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    for policy in (saves, [aten.mm.default]):

        def f(m: Apply, x: Tensor, policy: Any = policy) -> Tensor:
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(body, m, x, use_reentrant=False, context_fn=contexts) @ m.w

        plan = sw.plan(Apply(f), (X,), devices=4)
        again = {
            plan.program.instructions[i].op.kind
            for region in plan.regions
            for i in region.recompute_set
            if hasattr(plan.program.instructions[i], "op")
        }
        assert again == {"tanh"}  # what is made of saved products
        assert_as_one_device(Apply(f), (X,))

    def own(m: Apply, x: Tensor) -> Tensor:
        return checkpoint(body, m, x, use_reentrant=False, context_fn=lambda: (torch.no_grad(), torch.no_grad()))

    with pytest.raises(sw.CaptureError, match=r"test_rematerialization.py:\d+: .*contexts of its own"):
        sw.plan(Apply(own), (X,), devices=4)


def test_mistakes() -> None:
    with pytest.raises(sw.SettingError, match="is not an operator"):
        sw.recompute(3)
    with pytest.raises(sw.SettingError, match="no policy"):
        sw.plan(Apply(body), (X,), devices=4, recompute=3)
    with pytest.raises(sw.SettingError, match="policy says 'drop'") as raised:
        sw.plan(Apply(body), (X,), devices=4, recompute=lambda op: "drop")
    assert raised.value.source.startswith("test_rematerialization.py:") and raised.value.operator == "matmul"


# -- runs out of the ordinary ------------------------------------------------------------------------------------------


def test_several_backwards() -> None:
    net, plain = network(4).eval(), network(4).eval()
    blocks(net)
    model, other = wrapped(net, 4), wrapped(plain, 4)
    batches = [(draw(16, 8, seed=s), labels(16, seed=s)) for s in range(3)]
    ours, theirs = ([m(*b) for b in batches] for m in (model, other))
    for losses in (ours, theirs):  # two graphs at a time, one of them twice, the last never
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
    same_bits([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
    with torch.no_grad():
        assert torch.equal(model(*batches[0]), other(*batches[0]))


class Normed(nn.Module):
    """Buffers that the forward changes, read by what is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8, dtype=D), nn.BatchNorm1d(8, dtype=D)
        self.register_buffer("scale", torch.ones(8, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        before = self.scale.clone()
        self.scale.mul_(1.5)
        return torch.sigmoid(torch.tanh(self.norm(self.fc(x))) * before * self.scale)


def test_buffers_change_once() -> None:
    net = nn.Sequential(sw.recompute(Normed()), nn.Linear(8, 8, dtype=D))
    for devices in (2, 4):
        model = assert_as_one_device(copy.deepcopy(net), (X,), (X,), devices=devices)
        assert model.plan.regions


def test_what_changes_in_between_is_noticed() -> None:
    net = sw.recompute(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(D))
    loss = wrapped(net, 2)(X, T)
    with torch.no_grad():
        net[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


# -- processes ---------------------------------------------------------------------------------------------------------


class _Sent:
    """Notes the collectives that a process takes part in: those through memory that the ranks of a host share."""

    def __init__(self) -> None:
        self.count = 0
        self._kept = {way: getattr(SameHost, way) for way in ("all_reduce", "exchange", "gather", "reduce_scatter")}

    def __enter__(self) -> _Sent:
        for way, collective in self._kept.items():
            setattr(SameHost, way, self._counted(collective))
        return self

    def __exit__(self, *_: object) -> None:
        for way, collective in self._kept.items():
            setattr(SameHost, way, collective)

    def _counted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.count += 1
            return collective(*args)

        return counted


def on_a_rank(rank: int, world: int) -> None:
    results = {}
    for way in ("plain", "modules", "results of collectives kept", "operators"):
        mark, options = WAYS.get(way, (lambda net: None, {}))
        net = network(world)
        mark(net)
        sw.init()
        model = (
            sw.AutoParallel(net, CROSS_ENTROPY, **options).dataset_strategy("full_batch").comm_fusion(openstate=False)
        )
        optimizer, out = torch.optim.SGD(net.parameters(), 0.1), []
        torch.manual_seed(11)
        for seed in range(2):
            with _Sent() as forward:
                loss = model(draw(16, 8, seed=seed), labels(16, seed=seed))
            with _Sent() as backward:
                loss.backward()
            out += [loss.detach(), *(p.grad.to_local().clone() for p in net.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        results[way] = out
        planned = model.plan.collectives(rank)
        assert forward.count == sum(c.phase == "forward" for c in planned), way
        assert backward.count == sum(c.phase != "forward" for c in planned), way
        assert isinstance(next(net.parameters()), DTensor)
        same_bits(out, results["plain"])
    one = network(world).eval()
    net = network(world).eval()
    blocks(net)
    model = sw.AutoParallel(net, CROSS_ENTROPY).dataset_strategy("full_batch")
    loss, expected = model(X, T), CROSS_ENTROPY(one(X), T)
    loss.backward(), expected.backward()
    close(loss, expected)
    close([p.grad.full_tensor() for p in net.parameters()], [p.grad for p in one.parameters()])


def test_in_processes() -> None:
    run_ranks(on_a_rank, 4)
