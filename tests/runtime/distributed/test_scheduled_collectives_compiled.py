"""The graphs of compiled programs, as rank 3 of 8 on the code path of NCCL: one graph, without breaks;
gradients summed inside; weights gathered again; parameters at static addresses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collective_log import rank_of_eight
from gpt import GPT, mark
from ranks import run_ranks, run_scenarios
from small_networks import D, draw
from torch import Tensor, nn

import shardwright as sw
from shardwright.cost.communication_schedule import block_of
from shardwright.process_runtime import Runtime, playing
from shardwright.runtime.compilation import Compilation
from shardwright.runtime.distributed.scheduled_collectives import gathers_ahead

BATCH, LENGTH, VOCABULARY = 16, 16, 64


class Graphs:
    """A backend that keeps what it is given: the graphs after the partitioner of inductor."""

    def __init__(self) -> None:
        self.captured, self.forwards, self.backwards = 0, list[Any](), list[Any]()
        self.static: list[int] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from functorch.compile import aot_module_simplified, make_boxed_func, min_cut_rematerialization_partition

        self.captured += 1

        def forward(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            context = torch._guards.TracingContext.get()
            assert context.fw_metadata is not None
            self.static = list(context.fw_metadata.static_input_indices)
            self.forwards.append(graph.graph)
            return make_boxed_func(graph.forward)

        def backward(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            self.backwards.append(graph.graph)
            return make_boxed_func(graph.forward)

        return aot_module_simplified(
            module, inputs, fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition
        )


def kinds(graph: torch.fx.Graph) -> list[str]:
    """The operators of a graph, in order, by their plain names."""
    return [n.target.overloadpacket.__name__ for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


class TokenLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = sw.Operator(F.cross_entropy)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.cross_entropy(logits.flatten(0, 1), target.flatten())


class LlamaBlock(nn.Module):
    """Rotated positions, root mean squares, gated products and fewer heads of keys."""

    def __init__(self, width: int, heads: int, kept: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.kept, self.size = heads, kept, width // heads
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, self.size * kept, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down, self.drop = nn.Linear(2 * width, width, bias=False), nn.Dropout(dropout)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def turned(x: Tensor) -> Tensor:
            left, right = x.chunk(2, -1)
            return x * cos + torch.cat((-right, left), -1) * sin

        y = self.norms[0](x)
        split = lambda made, heads: made.unflatten(-1, (heads, self.size)).transpose(1, 2)
        query = turned(split(self.query(y), self.heads))
        key, value = turned(split(self.key(y), self.kept)), split(self.value(y), self.kept)
        many = self.heads // self.kept
        key, value = key.repeat_interleave(many, 1), value.repeat_interleave(many, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        y = self.norms[1](x)
        return x + self.drop(self.down(F.silu(self.gate(y)) * self.up(y)))


class LlamaLike(nn.Module):
    """A block between an embedding and a head."""

    def __init__(self, width: int = 64, heads: int = 8, kept: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        size = width // heads
        self.tokens, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList([LlamaBlock(width, heads, kept, dropout)])
        self.norm = nn.RMSNorm(width)
        angles = torch.outer(torch.arange(LENGTH), 10000.0 ** -(torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.second, self.norm2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class ResNetLike(nn.Module):
    """A stem and a block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(ResidualBlock())
        self.drop, self.out = nn.Dropout(dropout), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.max_pool2d(F.relu(self.norm(self.stem(x))), 2))
        return self.out(self.drop(x.mean((2, 3))))


def marked(net: nn.Module, loss: nn.Module) -> None:
    """dp2 x tp4."""
    if isinstance(net, GPT):
        mark(net, loss, 2, 4)
    elif isinstance(net, LlamaLike):
        for block in net.blocks:
            for layer in (block.query, block.key, block.value, block.gate, block.up):
                sw.shard(layer, ((2, 1, 1), (4, 1)))
            for layer in (block.out, block.down):
                sw.shard(layer, ((2, 1, 4), (1, 4)))
    else:
        for block in net.blocks:
            sw.shard(block.first, ((2, 1, 1, 1), (4, 1, 1, 1)))
        sw.shard(net.out, ((2, 1), (4, 1)))


TEXT = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % VOCABULARY
MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[[], nn.Module], tuple[Tensor, Tensor]]] = {
    "GPT": (lambda dropout: GPT(VOCABULARY, LENGTH, 1, 64, 8, dropout), TokenLoss, (TEXT, TEXT)),
    "Llama": (lambda dropout: LlamaLike(dropout=dropout), TokenLoss, (TEXT, TEXT)),
    "ResNet": (ResNetLike, nn.CrossEntropyLoss, (torch.ones(BATCH, 3, 8, 8), torch.arange(BATCH) % 8)),
}
PLANS = ("data_parallel", "dp2 x tp4", "level1", "level3", "dropout")


def compiled(model: str, plan: str) -> tuple[Graphs, sw.AutoParallel, dict[str, Any]]:
    """The graphs of three steps, the model, and the counts of the compiler."""
    make, make_loss, batch = MODELS[model]
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters
    counts.clear()
    torch.manual_seed(0)
    net, loss, graphs = make(dropout=0.1 if plan == "dropout" else 0.0), make_loss(), Graphs()
    whole = plan in ("dp2 x tp4", "dropout")
    if whole:
        marked(net, loss)
    made = sw.AutoParallel(net, loss, "semi_auto" if whole else "data_parallel", compile=graphs)
    if plan.startswith("level"):
        made.hsdp(threshold=0, optimizer_level=plan)
    made.dataset_strategy("full_batch")
    for _ in range(3):
        made(*batch).backward()
    return graphs, made, {"breaks": dict(counts["graph_break"]), "graphs": counts["stats"].get("unique_graphs")}


@pytest.fixture(scope="module")
def results() -> Callable[[str, str], Any]:
    known: dict[tuple[str, str], Any] = {}

    def of(model: str, plan: str) -> Any:
        if (model, plan) not in known:
            with rank_of_eight(rank=3):
                known[model, plan] = compiled(model, plan)
        return known[model, plan]

    return of


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_one_graph(results: Any, model: str, plan: str) -> None:
    graphs, made, counts = results(model, plan)
    assert counts == {"breaks": {}, "graphs": 1}
    assert (graphs.captured, len(graphs.forwards), len(graphs.backwards)) == (1, 1, 1)
    assert all(p.grad is not None for p in made.parameters())
    # Parameters and buffers are read where they are; the inputs and the seed come anew.
    program = next(iter(made._programs.values()))
    read = len(list(made.parameters())) + len(program.body.lowered.buffers) + len(program.body.lowered.constants)
    inputs = len([n for n in graphs.forwards[0].nodes if n.op == "placeholder"])
    assert len(graphs.static) >= min(read, inputs - 3) and len(graphs.static) < inputs


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("plan", ["data_parallel", "dp2 x tp4"])
def test_sums_of_gradients_start_as_gradients_come(results: Any, model: str, plan: str) -> None:
    graphs, made, _ = results(model, plan)
    order = kinds(graphs.backwards[0])
    waits = [i for i, kind in enumerate(order) if kind == "wait_tensor"]
    sums = [i for i, kind in enumerate(order) if kind == "all_reduce"]
    work = [i for i, kind in enumerate(order) if kind in ("mm", "addmm", "convolution_backward")]
    program = next(iter(made._programs.values()))
    assert not program.body.sums  # none is left for after the backward
    # The first sum starts in front of other work, and its wait comes behind all of it.
    assert sums[0] < work[-1]
    assert sum(wait > work[-1] for wait in waits) >= len([i for i in sums if i > work[0]]) // 2
    assert not [wait for wait, start in zip(waits[-len(sums) :], sums) if wait < start]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("level", ["level1", "level3"])
def test_scatters_of_gradients_are_waited_for_at_the_end(results: Any, model: str, level: str) -> None:
    order = kinds(results(model, level)[0].backwards[0])
    scatters = [i for i, kind in enumerate(order) if kind == "reduce_scatter_tensor"]
    work = [i for i, kind in enumerate(order) if kind in ("mm", "addmm", "convolution_backward")]
    waits = [i for i, kind in enumerate(order) if kind == "wait_tensor"]
    assert len(scatters) >= 3 and scatters[0] < work[-1] < waits[-len(scatters)]


@pytest.mark.parametrize("model", MODELS)
def test_weights_that_are_kept_travel_by_blocks_and_ahead(results: Any, model: str) -> None:
    graphs, made, _ = results(model, "level1")
    order = kinds(graphs.forwards[0])
    gathers = [i for i, kind in enumerate(order) if kind == "all_gather_into_tensor"]
    messages = [message for _, message in made.plan.schedule.of("gather")]
    assert len(gathers) == len(messages) == len({block_of(m.name) for message in messages for m in message.members})
    waits = [i for i, kind in enumerate(order) if kind == "wait_tensor"]
    assert gathers[1] < waits[0]  # the second block's is under way before the first one's is waited for
    work = [i for i, kind in enumerate(order) if kind in ("mm", "addmm", "convolution")]
    assert any(issued < at < wait for issued, wait in zip(gathers, waits) for at in work)


@pytest.mark.parametrize("model", MODELS)
def test_weights_are_gathered_again_in_the_backward(results: Any, model: str) -> None:
    kept, again = (Counter(kinds(results(model, level)[0].backwards[0])) for level in ("level1", "level3"))
    graphs = results(model, "level3")[0]
    gathers = Counter(kinds(graphs.forwards[0]))["all_gather_into_tensor"]
    assert not kept["all_gather_into_tensor"]
    assert 0 < again["all_gather_into_tensor"] <= gathers
    messages = results(model, "level3")[1].plan.schedule.of("gather")
    assert gathers == len(list(messages))  # one for each block
    # No gathered weight goes from the forward to the backward.
    output = next(n for n in graphs.forwards[0].nodes if n.op == "output")
    saved = {n for n in output.args[0] if isinstance(n, torch.fx.Node)}
    assert not [n for n in saved if "wait_tensor" in str(n.target) and n.meta["val"].dim()]


@pytest.mark.parametrize("model", MODELS)
def test_weights_that_are_gathered_again_travel_one_block_ahead(results: Any, model: str) -> None:
    graphs = results(model, "level3")[0]
    for graph in (graphs.forwards[0], graphs.backwards[0]):
        before, copy = in_order(graph), torch.fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        gathers_ahead(copy)
        copy.lint()  # nothing stands in front of what it needs
        after = in_order(copy)
        assert sorted(after) == sorted(before) and len(after) >= 4
        # A gather and its wait, a gather and its wait; then the next gather is issued in front of each wait.
        assert all((kind == "issue") == (k % 2 == 0) for k, (kind, _) in enumerate(before)) or graph in graphs.forwards
        issues = [k for k, (kind, _) in enumerate(after) if kind == "issue"]
        waits = [k for k, (kind, _) in enumerate(after) if kind == "wait"]
        assert all(following < wait for following, wait in zip(issues[1:], waits))
        assert all(earlier < issue for earlier, issue in zip(waits, issues[2:]))  # and no more than two at a time


def in_order(graph: torch.fx.Graph) -> list[tuple[str, int]]:
    """The issues and waits of gathers, in order, with the number of the gather."""
    number = {n: k for k, n in enumerate(n for n in graph.nodes if "all_gather_into_tensor" in str(n.target))}
    return [
        ("issue", number[n]) if n in number else ("wait", number[n.args[0]])
        for n in graph.nodes
        if n in number or ("wait_tensor" in str(n.target) and n.args[0] in number)
    ]


class _Written(Exception):
    """The program that inductor has written is all that a test needs of it."""


def test_inductor_leaves_the_gathers_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor itself, up to the text of its program, beside an option of the user's own."""
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.graph import GraphLowering

    def written(text: str) -> None:
        raise _Written(text)

    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(written))
    # Inductor would look for vector instructions with a compiler of C++ and a process for each kind of them.
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    torch._dynamo.reset()
    net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)))
    model = sw.AutoParallel(net, nn.MSELoss(), "data_parallel", compile={"options": {"cpp.simdlen": 1}})
    model.hsdp(threshold=0, optimizer_level="level3").dataset_strategy("full_batch")
    with (
        rank_of_eight(rank=3),
        config.patch(fx_graph_cache=False),
        pytest.raises(Exception, match="async_compile") as e,
    ):
        model(torch.ones(16, 16), torch.ones(16, 16))
    calls = re.findall(r"= torch.ops._c10d_functional.(all_gather)|functional.(wait_tensor).default", str(e.value))
    assert ["issue" if issued else "wait" for issued, _ in calls][:6] == [
        "issue",
        "issue",
        "wait",
        "issue",
        *2 * ["wait"],
    ]


@pytest.mark.parametrize("model", MODELS)
def test_the_compiler_sees_the_words_of_masks(results: Any, model: str) -> None:
    graphs = results(model, "dropout")[0]
    for graph in (graphs.forwards[0], graphs.backwards[0]):
        assert "mask" not in kinds(graph)
    assert "bitwise_xor" in kinds(graphs.forwards[0])


def test_dropout_is_that_of_the_program_that_is_not_compiled() -> None:
    losses = []
    for compile in (False, "aot_eager"):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Linear(32, 8))
        model = sw.AutoParallel(net, nn.MSELoss(), compile=compile).dataset_strategy("full_batch")
        losses.append([])
        torch.manual_seed(4)  # the calls are counted from here
        with playing(Runtime(False, 1, 0, torch.device("cpu"))):
            for step in range(3):
                x = draw(16, 8, seed=step).float()
                loss = model(x, x)
                loss.backward()
                losses[-1].append((loss.item(), net[0].weight.grad.clone()))
    for (a, g), (b, h) in zip(*losses):
        assert abs(a - b) < 1e-6 and torch.allclose(g, h, atol=1e-6)


def test_another_model_of_the_process_is_compiled_as_ever() -> None:
    """The calls of modules that a planned model has watched are seen by the compiler of any model."""
    plain, net, x = nn.Linear(8, 8), nn.Linear(8, 8), torch.ones(8, 8)
    expected = plain(x)
    with rank_of_eight(rank=3):
        model = sw.AutoParallel(net, nn.MSELoss(), "data_parallel").dataset_strategy("full_batch").hsdp(threshold=0)
        model(x, x).backward()
        assert torch.equal(torch.compile(plain, backend="eager", fullgraph=True)(x), expected)
        with pytest.raises(sw.SettingError, match="Linear is called by itself"):
            net(x)


# -- numbers, on two processes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(8, 16, dtype=D), nn.Linear(16, 8, dtype=D)
        self.unused = nn.Linear(2, 2, dtype=D)
        self.scale = nn.Parameter(torch.ones(8, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x * self.scale))) * self.scale


def trained(call: Callable[[Tensor], Tensor], net: nn.Module, rounds: Any = None) -> list[float]:
    optimizer, out = None, []
    for step in range(3):
        losses = []
        for part in range(2):
            with rounds() if rounds is not None and part == 0 else torch.enable_grad():
                losses.append(call(draw(4, 8, seed=2 * step + part)).square().mean())
                losses[-1].backward()
        optimizer = optimizer or torch.optim.AdamW([p for p in net.parameters() if p.grad is not None], 1e-2)
        optimizer.step()
        optimizer.zero_grad()
        out += [loss.item() for loss in losses]
    return out


def as_one_device(level: str | None, mixed: dict[str, Any] | None) -> Callable[[int, int], None]:
    def scenario(rank: int, world: int) -> None:
        from shardwright.runtime.distributed import collectives

        exchanges = collectives.dist.get_backend
        collectives.dist.get_backend = lambda *_: "library"  # type: ignore[assignment]
        try:
            plain, net = Net(), Net()
            expected = trained(plain, plain)
            model = sw.AutoParallel(net, None, "data_parallel", compile="aot_eager", mixed_precision=mixed)
            model.dataset_strategy("full_batch")
            if level is not None:
                model.hsdp(threshold=0, optimizer_level=level)
            got = trained(model, net, model.no_sync)
            assert max(abs(a - b) for a, b in zip(got, expected)) < (1e-5 if mixed else 1e-10), (got, expected)
            assert all(p.grad is None or p.grad.dtype == p.dtype == D for p in net.parameters())
            assert net.unused.weight.grad is None
        finally:
            collectives.dist.get_backend = exchanges

    return scenario


COARSE = {"param_dtype": torch.float32}
LEVELS: dict[str, tuple[str | None, dict[str, Any] | None]] = {
    "none": (None, None),
    "level1": ("level1", None),
    "level3": ("level3", None),
    "mixed": (None, COARSE),
    "mixed level1": ("level1", COARSE),
    "mixed, sums in the stored dtype": (None, COARSE | {"reduce_dtype": D}),
    "mixed level3, sums in the stored dtype": ("level3", COARSE | {"reduce_dtype": D}),
}


def on_ranks(rank: int, world: int) -> dict[str, str | None]:
    return run_scenarios(rank, world, {name: as_one_device(*case) for name, case in LEVELS.items()})


@pytest.fixture(scope="module")
def processes() -> list[dict[str, str | None]]:
    # The imports of a compiler, and of its partitioner: once here, and not in every rank.
    torch.compile(torch.relu, backend="aot_eager")(torch.ones(1, requires_grad=True))
    return run_ranks(on_ranks, 2)


@pytest.mark.parametrize("name", LEVELS)
def test_as_one_device(processes: list[dict[str, str | None]], name: str) -> None:
    for rank, result in enumerate(processes):
        assert result[name] is None, f"rank {rank}:\n{result[name]}"


# -- settings


def test_further_options_stand_beside_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[dict[str, Any]] = []
    settings = ({"mode": "max-autotune-no-cudagraphs"}, {"options": {"epilogue_fusion": True, "max_autotune": False}})
    ways = [Compilation.of(setting) for setting in (*settings, True, "aot_eager")]
    monkeypatch.setattr(torch, "compile", lambda program, **given: passed.append(given))
    for way in ways:
        assert way is not None
        way.compiled(nn.ReLU(), {"max_autotune": True, "dce": True})
    mode, options, plain, other = passed
    assert options["options"] == {"max_autotune": False, "dce": True, "epilogue_fusion": True}
    assert plain["options"] == {"max_autotune": True, "dce": True} and "options" not in other
    assert mode["options"]["coordinate_descent_tuning"] and mode["options"]["dce"] and "mode" not in mode


def test_settings_of_the_compiler() -> None:
    assert Compilation.of(False) is None and Compilation.of(True) == Compilation()
    best = Compilation.of({"mode": "max-autotune"})
    assert best is not None and best.arguments() == {"backend": "inductor", "dynamic": False, "mode": "max-autotune"}
    reported = Compilation.of({"options": {"max_autotune": True}})
    assert reported is not None and reported.arguments()["options"] == {"max_autotune": True}
    model = sw.AutoParallel(nn.Linear(2, 2), compile={"mode": "max-autotune"})
    assert model._running.compiled == best and "max-autotune" in repr(model._running)
    for wrong, words in (
        ({"mode": "fastest"}, "unknown mode 'fastest'"),
        ({"speed": 1}, "unknown 'speed'"),
        ({"options": {"max_autotun": True}}, "max_autotun"),
        ({"mode": "max-autotune", "options": {"max_autotune": True}}, "mode='max-autotune' and options"),
        ({"backend": "aot_eager", "mode": "max-autotune"}, "for the backend 'aot_eager'"),
        ("inductr", "unknown backend 'inductr'"),
        (3, "compile=3"),
    ):
        with pytest.raises(sw.SettingError, match=words.replace("(", r"\(")):
            sw.AutoParallel(nn.Linear(2, 2), compile=wrong)
