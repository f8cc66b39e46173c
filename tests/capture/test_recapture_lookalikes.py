"""Models of one structure: a further one follows the program of an earlier one, and its graph is that of its export."""

import gc
import random
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from capture_count import captured_once, counted_captures, without_lines
from small_networks import D, draw, labels
from test_recapture import Language, same
from torch import nn

import shardwright as sw
from shardwright.capture import recapture
from shardwright.capture.export import capture


@pytest.fixture
def captures(monkeypatch):
    return counted_captures(monkeypatch)


@pytest.fixture
def lent(monkeypatch):
    """Models follow the programs of earlier ones, as a user's do."""
    recapture.forget_programs()
    monkeypatch.setattr(recapture, "MOST_PROGRAMS", 4)
    yield
    recapture.forget_programs()


@pytest.fixture
def shared(captures, lent):
    """The captures, likewise."""
    return captures


@without_lines
def exported_alone(net, args, **given):
    """The graph of an export, whatever was captured before."""
    earlier = dict(recapture._BY_STRUCTURE)
    recapture.forget_programs()
    graph = captured_once(net, args, **given)
    recapture._BY_STRUCTURE.update(earlier)
    recapture._BY_STRUCTURE.nodes = kept_nodes()
    return graph


def kept_nodes():
    return sum(program.length for programs in recapture._BY_STRUCTURE.values() for program in programs)


class Lookalike(nn.Module):
    def __init__(self, f, k=2.0):
        super().__init__()
        self.a, self.b, self.f, self.k = nn.Linear(8, 8, dtype=D), nn.Linear(8, 8, dtype=D), f, k

    def forward(self, x):
        return self.f(self, self.b(torch.relu(self.a(x))))


def times(m, x):
    return x * m.k


def timed(m, x):
    return x * float(time.time() > m.k)


#: Models of one structure, whose forwards or states differ.
LOOKALIKES = {
    "another number": lambda: Lookalike(times, 3.0),
    "a number of another type": lambda: Lookalike(times, 3),
    "a tensor in the place of a number": lambda: Lookalike(times, torch.tensor(2.0, dtype=D)),
    "another operator": lambda: Lookalike(lambda m, x: x + m.k),
    "the same operator at another line": lambda: Lookalike(lambda m, x: x * m.k),
    "another module": lambda: Lookalike(lambda m, x: m.a(x) * m.k),
    "more operators": lambda: Lookalike(lambda m, x: (x * m.k).exp()),
    "fewer operators": lambda: Lookalike(lambda m, x: x),
    "a value of its own": lambda: Lookalike(lambda m, x: x * torch.full_like(x, m.k)),
    "a constant": lambda: Lookalike(lambda m, x: x * torch.tensor(m.k, dtype=D)),
    "the state of python": lambda: Lookalike(lambda m, x: x * m.k * len(m.__dict__)),
    "a result twice": lambda: Lookalike(lambda m, x: (x * m.k, x)),
    "a branch on a size": lambda: Lookalike(lambda m, x: times(m, x) if len(x) > 4 else x.tanh()),
    "frozen": lambda: Lookalike(times).requires_grad_(False),
    "partly frozen": lambda: (lambda m: m.a.requires_grad_(False) and m)(Lookalike(times)),
    "tied": lambda: (lambda m: setattr(m.b, "weight", m.a.weight) or m)(Lookalike(times)),
    "exchanged": lambda: (lambda m: setattr(m, "a", m._modules.pop("b")) or setattr(m, "b", nn.Linear(8, 8)) or m)(
        Lookalike(times)
    ).to(D),
    "in evaluation": lambda: Lookalike(times).eval(),
    "float32": lambda: Lookalike(times).float().to(D),
    "marked": lambda: (lambda m: setattr(m, "b", sw.shard(m.b, ((2, 1), (2, 1)))) or m)(Lookalike(times)),
    "no bias": lambda: (lambda m: m.b.register_parameter("bias", None) or m)(Lookalike(times)),
    "hooked": lambda: (lambda m: m.a.register_forward_hook(lambda *_: _[2].neg()) and m)(Lookalike(times)),
}


def test_a_model_of_the_same_structure_follows_the_program_of_an_earlier_one(shared):
    """The earlier one is freed."""
    net = Lookalike(times)
    reference, before = weakref.ref(net), exported_alone(net, (draw(6, 8),))
    capture(net, (draw(6, 8),))
    del net
    gc.collect()
    assert reference() is None
    del shared[:]
    other = Lookalike(times, 3.0)
    made = capture(other, (draw(4, 8),))
    assert shared == ["light run"] and "3.0" in str([op.args for op in made.ops])
    same(made, exported_alone(other, (draw(4, 8),)))
    assert [op.source for op in made.ops] == [op.source for op in before.ops]


@pytest.mark.parametrize("rows", [3, 6])
def test_the_graph_of_a_lookalike_is_that_of_its_export(shared, rows):
    """All after one another, so that each meets the programs of those before."""
    x, cases = draw(rows, 8), [partial(Lookalike, times), *LOOKALIKES.values()]
    alone = [exported_alone(case(), (x,)) for case in cases]
    for case, reference in list(zip(cases, alone, strict=True)) * 2:
        same(capture(case(), (x,)), reference)
    assert shared.count("light run") > len(LOOKALIKES)


def test_a_model_of_torchs_modules_has_the_line_of_its_own_call(shared):
    """Two models of torch's modules, called at two lines: the second follows the program of the first. Each has its
    line, at another size too."""
    nets = [nn.Sequential(nn.Linear(8, 8, dtype=D), nn.ReLU()) for _ in range(3)]
    x, further = draw(3, 8), draw(5, 8)
    first = capture(nets[0], (x,))
    second, alone = (f(nets[1], (x,)) for f in (capture, exported_alone))
    assert shared == ["export", "light run", "export"]
    same(second, alone)
    del shared[2:]
    third = [capture(net, (further,)) for net in (*nets, nets[1])]
    assert shared[2:] == ["light run"] * 4
    lines = [{op.source for op in graph.ops} for graph in (first, second, *third)]
    assert all(len(each) == 1 for each in lines)
    numbers = [int(each.pop().rpartition(":")[2]) for each in lines]
    assert numbers == [numbers[0], numbers[0] + 1, *[numbers[0] + 5] * 4]


def test_a_line_of_the_forward_is_no_line_of_the_call(shared):
    """Both stand on one line: a later call, of another line, does not move the forward's."""
    class_ = "class Net(nn.Module):\n    forward = lambda self, x: x.relu() * 2.0"
    one = f"{class_}; made = lambda: capture(Net(), (x,))\nmade = Net.made"
    scope = {"capture": capture, "nn": nn, "x": draw(3, 8)}
    exec(compile(one, "users.py", "exec"), scope)
    graphs = [scope["made"](), capture(scope["Net"](), (draw(3, 8),))]
    assert shared == ["export", "light run", "export"]
    assert [{op.source for op in graph.ops} for graph in graphs] == [{"users.py:2"}] * 2


def random_model(draws: random.Random) -> nn.Module:
    """A model of torch's modules, some of whose weights may be tied."""

    def layer() -> nn.Module:
        kinds = (nn.ReLU, nn.Tanh, lambda: nn.LayerNorm(8, dtype=D), lambda: nn.Dropout(draws.choice((0.0, 0.1))))
        plain = draws.choice((*kinds, lambda: nn.Linear(8, 8, bias=draws.random() < 0.5, dtype=D)))
        return draws.choice((plain, lambda: nn.Sequential(plain(), plain())))()

    net = nn.Sequential(*(layer() for _ in range(draws.randint(1, 4))))
    products = [module for module in net.modules() if isinstance(module, nn.Linear)]
    if len(products) > 1 and draws.random() < 0.3:
        products[0].weight = products[1].weight
    return net


@pytest.mark.parametrize("seed", range(12))
def test_random_models_at_random_lines_are_captured_as_alone(shared, seed):
    """Two models of one structure in turn, at lines and sizes of three calls each."""
    draws, scope = random.Random(seed), {"capture": capture, "alone": exported_alone}
    scope["loss"] = draws.choice((None, nn.MSELoss()))
    for call in range(6):
        if call < 2:
            scope.setdefault("nets", []).append(random_model(random.Random(seed)))
        x = draw(draws.choice((2, 3, 5)), 8)
        scope |= {"net": scope["nets"][call % 2], "args": (x,) if scope["loss"] is None else (x, draw(*x.shape))}
        line = draws.randint(1, 3)
        text = "\n" * (line - 1) + "made = [each(net, args, loss_fn=loss) for each in (capture, alone)]"
        exec(compile(text, "users.py", "exec"), scope)
        same(*scope["made"])
        assert {op.source for op in scope["made"][0].ops} <= {f"users.py:{line}"}
    assert shared.count("export") == 7, "six alone, and one that the other five follow"


def closing(*inner):
    """A function that calls others, which it closes over."""
    return lambda m, x: inner[0](m, x)


def wrapping(inner):
    return lambda m, x: inner(m, x)


def mutual():
    def even(m, x, n=2):
        return x if n == 0 else odd(m, x * m.k, n - 1)

    def odd(m, x, n):
        return x if n == 0 else even(m, x + 1, n - 1)

    return even


def test_functions_that_close_over_others(shared):
    """Wrappers are told apart by what they call; functions may call one another."""
    inner = [times, lambda m, x: x + m.k, lambda m, x: x * m.k]
    for f in [*map(wrapping, inner), *map(closing, inner), mutual(), partial(times), mutual(), wrapping(mutual())] * 2:
        net, x = Lookalike(f), draw(3, 8)
        same(capture(net, (x,)), exported_alone(net, (x,)))
    structures = {recapture.structure_of(Lookalike(wrapping(f)), None, None, False, None, ((), {})) for f in inner}
    assert len(structures) == len(inner)


def test_threads_share_the_programs(lent):
    """Several threads keep programs and look them up at once, within the limit."""
    exported = recapture.Program(torch.export.export(Language(), (labels(32, 16).view(4, 8),), strict=False))
    with ThreadPoolExecutor(3) as threads:
        for use in (recapture.keep_for_structure, lambda key, _: recapture.programs_of_structure(key)) * 2:
            list(threads.map(use, range(300), [exported] * 300))
    held = sum(len(programs) for programs in recapture._BY_STRUCTURE.values())
    assert 1 < held * exported.length <= recapture.MOST_NODES
    assert recapture._BY_STRUCTURE.nodes == kept_nodes()


@pytest.mark.parametrize("loss", [lambda y, t: (y - t).square().mean(), lambda y, t: (y - t).abs().mean()])
def test_losses_are_told_apart(shared, loss):
    for one in (loss, lambda y, t: (y - t).square().sum(), loss, nn.MSELoss(), nn.MSELoss(reduction="sum")):
        net = Lookalike(times)
        args = draw(3, 8), draw(3, 8)
        same(capture(net, args, loss_fn=one), exported_alone(net, args, loss_fn=one))


def test_a_program_with_a_constant_is_that_of_its_model_alone(shared):
    """A constant may be a tensor of the model, which a user changes in place."""
    for k in (2.0, 3.0):
        net = Lookalike(times, torch.tensor(k, dtype=D))
        (constant,) = capture(net, (draw(3, 8),)).constants.values()
        assert constant is net.k or constant.item() == k
    assert shared.count("export") == 2 and not recapture._BY_STRUCTURE


def test_a_further_model_has_a_second_run_too(shared):
    """A value that changes by itself is found in each model."""
    capture(Lookalike(timed, 0.0), (draw(3, 8),))
    del shared[:]
    capture(Lookalike(timed, 0.0), (draw(3, 8),))
    assert shared == ["light run"]
    with pytest.raises(sw.CaptureError, match="a value changes by itself"):
        capture(Lookalike(timed, time.time() + 60), (draw(3, 8),))


def test_programs_of_all_models_have_a_limit(shared, monkeypatch):
    monkeypatch.setattr(recapture, "MOST_NODES", 50)
    for length in range(30, 36):
        capture(Language(length=length), (labels(32, 16).view(4, 8),))
    assert len(recapture._BY_STRUCTURE) == 1 and recapture._BY_STRUCTURE.nodes == kept_nodes() > 50


@pytest.mark.parametrize("mode", ["data_parallel", "dynamic_programming"])
def test_a_model_that_is_planned_in_a_further_mode_is_not_exported(shared, mode):
    net, x = Lookalike(times), draw(8, 8)
    alone = sw.plan(net, (x,), parallel_mode=mode, devices=4)
    recapture.forget_programs()
    sw.plan(net, (x,), parallel_mode="stand_alone", devices=1)
    del shared[:]
    plan = sw.plan(net, (x,), parallel_mode=mode, devices=4)
    assert shared == ["light run"] and str(plan) == str(alone)
