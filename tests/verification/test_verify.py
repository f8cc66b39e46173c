"""The plan against one device: what agrees, what does not, and where it first does not."""

import inspect
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import forked_python
import operator_functional
import pytest
import torch
import torch.nn as nn
from capture_count import counted_captures
from paths import EXAMPLES

import shardwright as sw
from shardwright import process_runtime as process
from shardwright.capture.export import capture
from shardwright.cli import main
from shardwright.layout import Layout
from shardwright.verification.node_comparison import Comparison
from shardwright.verification.value_precision import Allowed, precisions
from shardwright.verification.verify import TOLERANCES, verify_call
from shardwright.verification.verify_report import VerifyReport


def line_of(thing, text: str) -> str:
    """``test_verify.py:35`` of the line of a class or function that holds `text`."""
    lines, first = inspect.getsourcelines(thing)
    offset = next(i for i, line in enumerate(lines) if text in line)
    return f"{Path(inspect.getsourcefile(thing)).name}:{first + offset}"


def batch(size=32):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(size, 1, 28, 28, generator=generator),), torch.randint(0, 10, (size,), generator=generator)


# -- operators whose rules are wrong -----------------------------------------------------------------------------------


@torch.library.custom_op("verify_tests::normed", mutates_args=())
def normed(x: torch.Tensor) -> torch.Tensor:
    """Divides each row by its length: the last dim may not be cut."""
    return x / x.norm(dim=-1, keepdim=True)


def _normed_backward(ctx, grad):
    with torch.enable_grad():
        x = ctx.saved_tensors[0].detach().requires_grad_()
        return torch.autograd.grad(x / x.norm(dim=-1, keepdim=True), x, grad)[0]


normed.register_fake(torch.empty_like)
normed.register_autograd(_normed_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))


@torch.library.custom_op("verify_tests::centred", mutates_args=())
def centred(x: torch.Tensor) -> torch.Tensor:
    """The identity, whose gradient loses its mean over the rows: they may not be cut."""
    return x.clone()


centred.register_fake(torch.empty_like)
centred.register_autograd(lambda ctx, grad: grad - grad.mean(0, keepdim=True))


@torch.library.custom_op("verify_tests::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    """The rows moved on by one."""
    return x.roll(1, 0)


turned.register_fake(torch.empty_like)
turned.register_autograd(lambda ctx, grad: grad.roll(-1, 0))


@torch.library.custom_op("verify_tests::sixteen", mutates_args=())
def sixteen(x: torch.Tensor) -> torch.Tensor:
    """Takes sixteen columns and no other number."""
    if x.shape[-1] != 16:
        raise ValueError(f"sixteen columns, not {x.shape[-1]}")
    return x.clone()


sixteen.register_fake(torch.empty_like)
sixteen.register_autograd(lambda ctx, grad: grad)


@torch.library.custom_op("verify_tests::widened", mutates_args=())
def widened(x: torch.Tensor) -> torch.Tensor:
    """Makes sixteen columns of whatever it gets."""
    return x.sum(-1, keepdim=True).repeat(1, 16)


widened.register_fake(lambda x: x.new_empty(x.shape[0], 16))
widened.register_autograd(lambda ctx, grad: grad.sum(-1, keepdim=True).expand_as(grad))

for wrong in (normed, centred, turned, sixteen, widened):
    sw.rule(wrong, "... -> ...")  # says that any dim may be cut


class Net(nn.Module):
    """The operator between two layers, beside a residual."""

    def __init__(self, operator, strategy):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.middle = sw.shard(operator, strategy)

    def forward(self, x):
        h = torch.relu(self.first(x))
        return h + self.second(self.middle(h))


# -- what agrees -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["semi_auto", "data_parallel", "stand_alone"])
def test_tutorial_network_agrees(mode):
    torch.manual_seed(0)
    inputs, label = batch()
    report = sw.verify(operator_functional.Network(), inputs, label, loss_fn=nn.CrossEntropyLoss(), parallel_mode=mode)
    assert report.ok and report.first_difference is None, report.summary()
    assert [d.dtype for d in report.differences] == [torch.float64, torch.float32]
    assert report.max_loss_difference <= 1e-12
    assert report.max_gradient_difference <= 1e-12
    assert report.max_parameter_difference <= 1e-12
    verdict = (
        "ok, but nothing was proved: stand_alone on 1 device" if mode == "stand_alone" else f"ok: {mode} on 8 devices"
    )
    assert report.summary().startswith(verdict) and report.proved == (mode != "stand_alone")
    if mode == "semi_auto":  # sums are taken in another order: not the very same program was run twice
        assert report.differences[1].gradient > 0
        assert report.plan.operator("matmul1").in_strategy == ((2, 4), (4, 1))


def test_the_model_and_its_surroundings_stay_as_they_are():
    inputs, label = batch()
    with sw.no_init_parameters():
        deferred = operator_functional.Network()
    torch.manual_seed(3)
    net = operator_functional.Network()
    before, random = {n: p.clone() for n, p in net.state_dict().items()}, torch.get_rng_state()
    for model in (deferred, net):
        assert sw.verify(model, inputs, label, loss_fn=nn.CrossEntropyLoss(), steps=1, dtypes=(torch.float32,)).ok
    assert deferred.w1.is_meta and deferred.w1.grad is None
    assert all(torch.equal(p, before[n]) for n, p in net.state_dict().items()) and net.w1.grad is None
    assert torch.equal(torch.get_rng_state(), random) and torch.get_default_dtype() == torch.float32


def test_many_kinds_of_state_and_results():
    class Kinds(nn.Module):
        """Tied, frozen and unused parameters, a buffer, a plain tensor, keyword inputs, integer results."""

        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = (nn.Linear(16, 16) for _ in range(3))
            self.two.weight = self.one.weight
            self.two.bias.requires_grad_(False)
            self.unused = nn.Parameter(torch.ones(3))
            self.register_buffer("mask", torch.ones(16))
            self.scale = torch.tensor([2.0])

        def forward(self, x, shift=None):
            x = torch.tanh(self.two(torch.tanh(self.one(x)))) * self.mask * self.scale + shift
            y = self.three(x)
            return {"y": y, "best": y.argmax(-1)}, y.mean()

    torch.manual_seed(0)
    with torch.inference_mode():
        x = torch.randn(16, 16)
    report = sw.verify(
        Kinds(),
        x,
        kwargs={"shift": torch.ones(16)},
        devices=4,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
    assert report.ok, report.summary()


def test_the_loss_may_be_a_module_with_parameters_of_its_own():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, output, target):
            return ((output - target).square() * self.weight).mean()

    torch.manual_seed(0)
    report = sw.verify(Net(torch.tanh, ((2, 4),)), (torch.randn(16, 16),), torch.randn(16, 16), loss_fn=Loss())
    assert report.ok, report.summary()
    assert "loss_fn.weight" in report.plan.parameters


def test_it_needs_no_runtime_but_its_own(monkeypatch):
    monkeypatch.setattr(process, "_current", [process.Runtime(True, 2, 1, torch.device("cpu"))])
    assert sw.verify(Net(torch.tanh, ((2, 4),)), (torch.randn(16, 16),), steps=1).ok


# -- what does not -----------------------------------------------------------------------------------------------------


def found(net: nn.Module, rows: int = 16, **settings) -> VerifyReport:
    torch.manual_seed(0)
    report = sw.verify(net, (torch.randn(rows, 16),), steps=2, **settings)
    assert not report.ok and not any(d.ok for d in report.differences)
    return report


def test_a_wrong_rule_is_found_with_operator_and_line():
    report = found(Net(normed, ((1, 8),)))
    first = report.first_difference
    assert (first.operator, first.op, first.phase, first.part) == ("middle", "normed", "forward", "operator")
    assert first.source == line_of(Net, "self.middle(h)")
    assert first.difference > 1e-3 and first.dtype == torch.float64
    assert report.max_loss_difference > 1e-3
    assert "NOT OK" in report.summary()
    assert f"first difference, forward: middle (normed), {first.source}: " in report.summary()
    assert sw.verify(Net(normed, ((8, 1),)), (torch.randn(16, 16),)).ok  # the same rule where it does no harm


def test_a_wrong_gradient_is_found_beside_a_residual():
    first = found(Net(centred, ((8, 1),))).first_difference
    assert (first.operator, first.op, first.phase, first.part) == ("middle", "centred", "gradient", "operator")
    assert first.source == line_of(Net, "self.middle(h)")


def test_results_in_another_order_do_not_pass():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.turn = sw.shard(turned, ((2, 1),))

        def forward(self, x):
            return self.turn(self.first(x))

    report = found(Last())
    assert report.max_loss_difference > 0.1  # though a mean of squares, and its gradient, would be the same
    assert report.first_difference.operator == "turn"


def test_an_operator_that_cannot_run_on_its_slices_is_a_finding():
    report = found(Net(sixteen, ((1, 2),)), devices=2)
    assert report.first_difference.operator == "middle" and math.isinf(report.first_difference.difference)
    assert "sixteen columns, not 8" in report.first_difference.message
    assert "could not run" in report.summary()


def test_slices_of_another_shape_are_a_finding():
    first = found(Net(widened, ((1, 4),)), devices=4).first_difference
    assert (first.operator, first.phase) == ("middle", "forward")
    assert "(16, 64) instead of (16, 16)" in first.message


@pytest.mark.parametrize("phase", ["forward", "gradient"])
def test_a_conversion_is_told_from_the_operator(monkeypatch, phase):
    from shardwright.runtime.local import local_executor

    right = local_executor.convert_shards

    def wrong(redistribution, shards, how):
        result = right(redistribution, shards, how)
        backward = sys._getframe(1).f_code.co_name == "transpose"
        there = redistribution.target.cuts == ((8, 1) if backward else (1, 8))
        hit = there and any(s.kind == "all_to_all" for s in redistribution.steps) and backward == (phase == "gradient")
        return 2 * result if hit else result

    monkeypatch.setattr(local_executor, "convert_shards", wrong)
    first = found(Net(torch.tanh, ((1, 8),))).first_difference
    assert (first.phase, first.part) == (phase, "conversion")
    assert first.operator == "middle" and "in the redistribution for it" in str(first)


def test_a_graph_that_is_not_the_model_is_told_apart():
    class Odd(nn.Module):
        def forward(self, x):
            return x * (2 if type(x) is torch.Tensor else 3)  # what the capture sees is another type

    first = found(Odd()).first_difference
    assert first.part == "capture" and "captured" in str(first)


def test_tolerances_are_for_the_caller_to_say():
    inputs, label = batch()
    exact = {"loss_fn": nn.CrossEntropyLoss(), "dtypes": (torch.float32,), "tolerances": {torch.float32: 1e-12}}
    report = sw.verify(operator_functional.Network(), inputs, label, **exact)
    assert not report.ok and report.headline.dtype == torch.float32
    assert sw.verify(Net(torch.tanh, ((2, 4),)), torch.randn(16, 16), dtypes=(torch.bfloat16,)).ok


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"steps": 0}, "steps=0"),
        ({"dtypes": (torch.int64,)}, "dtypes"),
        ({"targets": 1}, "without a loss_fn"),
        ({"devices": 0}, "devices=0"),
        ({"parallel_mode": "nothing"}, "unknown parallel_mode"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(sw.SettingError, match=message):
        sw.verify(Net(torch.tanh, ((8, 1),)), (torch.randn(16, 16),), **settings)


class Eight(nn.Module):
    def forward(self, x):
        return sixteen(x[:, :8])


def test_what_cannot_be_planned_is_raised_and_so_is_what_the_model_raises():
    with pytest.raises(sw.StrategyError, match="middle"):
        sw.verify(Net(torch.tanh, ((3, 1),)), (torch.randn(16, 16),), devices=3)
    with pytest.raises(ValueError, match="sixteen columns, not 8"):
        sw.verify(Eight(), (torch.randn(16, 16),))


# -- parts in a coarser type -------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A norm worked out in float32 whatever the model's type, between products in that type, and a branch without
    it."""

    def __init__(self, middle=None, strategy=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.beside = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.middle = sw.shard(middle, strategy) if middle is not None else torch.tanh

    def forward(self, x):
        h = self.first(x)
        wide = h.to(torch.float32)
        h = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(h.dtype)
        return self.second(self.middle(h)), self.beside(x)


def _off(by):
    """An operator that is cut in any dim, as its rule says, and adds `by` of the part's own mean to each part."""

    @torch.library.custom_op(f"verify_tests::off_{str(by).replace('-', '_').replace('.', '_')}", mutates_args=())
    def off(x: torch.Tensor) -> torch.Tensor:
        return x + by * x.mean()

    off.register_fake(torch.empty_like)
    off.register_autograd(lambda ctx, grad: grad + by * grad.mean())
    sw.rule(off, "... -> ...")
    return off


OFF = {by: _off(by) for by in (3e-2, 1e-6)}


def test_a_part_in_float32_has_its_tolerance_and_nothing_else_has():
    given = dict(parallel_mode="recursive_programming", cut=True, devices=4, steps=2)
    report = sw.verify(Normed(), torch.randn(16, 16), dtypes=(torch.float64,), **given)
    assert report.proved, report.summary()
    assert report.headline.dtype == torch.float64 and report.headline.tolerance == 1e-10
    assert sorted({w.tolerance for w in (report.headline.losses, report.headline.gradients)}) in ([1e-10, 1e-4], [1e-4])
    wide = line_of(Normed, "h.to(torch.float32)")
    allowed = Allowed(report.plan.graph, torch.float64, TOLERANCES)
    through, beside = allowed.result(0), allowed.result(1)
    assert (through.dtype, through.source) == (torch.float32, wide) and beside.dtype == torch.float64
    assert allowed.tolerance(through) == 1e-4 and allowed.tolerance(beside) == 1e-10
    gradients = {name: allowed.of_parameter(name).dtype for name, _ in Normed().named_parameters()}
    assert gradients == {n: torch.float64 if n.startswith("beside") else torch.float32 for n in gradients}
    assert f"allowed in float64: the tolerance of float32 ({through.operator}, {wide}) for" in report.summary()
    assert not sw.verify(Normed(), torch.randn(16, 16), dtypes=(torch.float32,), **given).headline.coarser


def test_the_search_for_a_first_difference_takes_the_program_that_was_compared(monkeypatch):
    """From the values at the beginning: nothing is captured again, and steps before it leave nothing behind."""
    made = counted_captures(monkeypatch)
    report = sw.verify(Normed(), torch.randn(16, 16), steps=2, dtypes=(torch.float64,), devices=4)
    assert report.headline.coarser and report.ok and report.first_difference is None, report.summary()
    assert made == ["export"]


def test_a_fault_above_the_tolerance_is_found_beside_a_part_in_float32():
    first = found(Normed(OFF[3e-2], ((2, 4),))).first_difference
    assert (first.operator, first.op, first.part) == ("middle", "off_0_03", "operator")
    assert first.tolerance == 1e-4 and first.precision.source == line_of(Normed, "h.to(torch.float32)")
    assert "more than the 1e-04 of float32 (" in str(first)


def test_a_fault_too_small_for_float32_is_found_where_no_float32_is():
    torch.manual_seed(0)
    report = sw.verify(Net(OFF[1e-6], ((2, 4),)), torch.randn(16, 16), steps=1, dtypes=(torch.float64,))
    assert not report.ok and report.first_difference.operator == "middle"
    assert report.first_difference.tolerance == 1e-10 and report.first_difference.precision.dtype == torch.float64


def test_a_wrong_partial_sum_is_found_before_a_norm_of_float32(monkeypatch):
    from shardwright.runtime.local import local_executor

    right = local_executor.convert_shards

    def wrong(redistribution, shards, how):
        result = right(redistribution, shards, how)
        summed = any(s.kind in ("all_reduce", "reduce_scatter") for s in redistribution.steps)
        return result * (1 + 1e-3) if summed else result

    monkeypatch.setattr(local_executor, "convert_shards", wrong)
    torch.manual_seed(0)
    net = Normed()
    sw.shard(net.first, ((1, 8), (1, 8), (1,)))
    report = sw.verify(net, torch.randn(16, 16), steps=1, dtypes=(torch.float64,))
    first = report.first_difference
    assert not report.ok and (first.tensor, first.source) == ("linear", line_of(Normed, "wide = h.to"))


def test_parameters_take_the_precision_of_their_gradients_step_by_step():
    class Tail(nn.Module):
        """The second layer's output is rounded to float32; the first layer's gradient goes through there."""

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            y = self.first(x)
            return y.mean(), self.second(y).to(torch.float32).to(x.dtype)

    graph = capture(Tail().double(), (torch.randn(8, 8, dtype=torch.float64),))
    once, twice = precisions(graph, 1), precisions(graph, 2)
    (first, _second) = (v.name for v in graph.outputs)
    assert once.values[first].dtype == torch.float64 and twice.values[first].dtype == torch.float32
    assert {p.dtype for p in once.state.values()} == {torch.float32}
    assert once.gradients[graph.parameters["second.weight"].name].dtype == torch.float32


# -- what proves nothing -----------------------------------------------------------------------------------------------


def test_a_plan_that_cuts_nothing_says_that_nothing_was_proved():
    torch.manual_seed(0)
    given = dict(devices=4, parallel_mode="dynamic_programming", steps=1, dtypes=(torch.float64,))
    alone = sw.verify(Net(torch.tanh, None), torch.randn(4, 16), **given)
    assert alone.ok and not alone.proved and alone.cut[0] == 0 and "cuts none of its" in alone.unproved
    assert alone.summary().startswith("ok, but nothing was proved: dynamic_programming on 4 devices")
    assert "to prove something: verify(..., cut=True)" in alone.summary()
    cut = sw.verify(Net(torch.tanh, None), torch.randn(4, 16), **given, cut=True)
    assert cut.proved and cut.cut[0] > cut.cut[1] / 2 and cut.sent > 0 and not cut.unproved, cut.summary()
    assert cut.summary().startswith("ok: dynamic_programming on 4 devices")
    assert f"cut: {cut.cut[0]} of {cut.cut[1]} operators; {cut.sent} collectives a step" in cut.summary()


def test_a_plan_that_sends_nothing_says_that_nothing_was_proved():
    class Each(nn.Module):
        def forward(self, x):
            return x * 2

    report = sw.verify(Each(), torch.randn(8, 4), parallel_mode="data_parallel", dataset_strategy="data_parallel")
    assert report.ok and report.cut == (1, 1) and report.sent == 0 and not report.proved
    assert "sends nothing" in report.summary()


def test_a_difference_is_told_whatever_was_proved():
    report = found(Net(sixteen, ((1, 2),)), devices=2)
    assert not report.proved and not report.unproved and report.summary().startswith("NOT OK")


# -- a call of a wrapped model, and the command line -------------------------------------------------------------------


def test_a_call_is_verified_with_the_wrapper_s_settings():
    torch.manual_seed(0)
    net = Net(torch.tanh, ((2, 4),))
    model = sw.AutoParallel(net, loss_fn=nn.MSELoss(), parallel_mode="data_parallel").dataset_strategy(((2, 1), (2, 1)))
    batch = torch.randn(16, 16), torch.randn(16, 16)
    report = verify_call(model, batch, devices=4, steps=1)
    assert report.ok and (report.devices, report.parallel_mode) == (4, "data_parallel")
    assert [layout.cuts for layout in report.plan.input_placement.inputs] == [(2, 1), (2, 1)]
    model.dataset_strategy("full_batch")  # not yet called: settings may still come


def command(monkeypatch, *arguments: str) -> int:
    """The command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["shardwright"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("SHARDWRIGHT_DEVICES", "")  # so that it is put back, whatever the command makes of it
    monkeypatch.setattr(process, "_current", [])
    try:
        return main.main(["verify", *arguments])
    except SystemExit as exit_:
        return exit_.code


def test_an_example_as_it_stands():
    done = forked_python.run(
        [
            sys.executable,
            "-m",
            "shardwright",
            "verify",
            "--steps",
            "2",
            str(EXAMPLES / "operator_objects.py"),
            "--dtype",
            "float64",
            "--batch_size",
            "16",
        ]
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok: semi_auto on 8 devices against one device, 2 steps")
    assert "step:" not in done.stdout  # the script went no further than its first call


@pytest.mark.parametrize("name", ["operator_functional", "layout_objects", "layout_functional"])
def test_the_other_examples(monkeypatch, capsys, name):
    assert command(monkeypatch, "--steps", "1", str(EXAMPLES / f"{name}.py"), "--batch_size", "16") == 0
    assert capsys.readouterr().out.startswith("ok: semi_auto on 8 devices")


def test_options_behind_a_script(monkeypatch, capsys):
    """Options of the command may stand there, as those of plan; words behind -- are the script's."""
    words = ("--batch_size", "16", "--steps", "1", "--", "--dtype", "float64")
    assert command(monkeypatch, str(EXAMPLES / "operator_objects.py"), *words) == 0
    out = capsys.readouterr().out
    assert "against one device, 1 step\n" in out and "float64" in out


MODEL = """
import torch, torch.nn as nn, shardwright as sw

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = sw.shard(nn.Linear(8, 8), ((2, 1), (2, 1), (2,)))
    def forward(self, x):
        return self.layer(x)

def as_tuple():
    return Net(), (torch.randn(8, 8),), torch.randn(8, 8), nn.MSELoss()

def as_dict():
    return {"net": Net(), "inputs": torch.randn(8, 8), "devices": 4, "tolerances": {torch.float64: 0, torch.float32: 0}}

def as_searched():
    return {"net": nn.Sequential(nn.Linear(8, 8), nn.Tanh()), "inputs": torch.randn(8, 8), "devices": 4, "steps": 1,
            "parallel_mode": "dynamic_programming"}

def as_nothing():
    return None
"""


FAILS = """
try:
    sw.AutoParallel(Net()).dataset_strategy("full_batch")(torch.randn(3, 8))
except Exception:
    print("caught")
"""


def test_functions_and_what_they_return(monkeypatch, capsys, tmp_path):
    (tmp_path / "verify_model.py").write_text(MODEL)
    target = f"{tmp_path / 'verify_model.py'}:"
    assert command(monkeypatch, "--devices", "4", target + "as_tuple") == 0
    assert "on 4 devices" in capsys.readouterr().out
    assert command(monkeypatch, target + "as_dict") in (0, 1)
    assert "on 4 devices" in capsys.readouterr().out
    assert command(monkeypatch, "--devices", "3", target + "as_tuple") == 1
    assert "layer" in capsys.readouterr().err
    assert command(monkeypatch, target + "as_searched") == 0
    assert "nothing was proved: the plan cuts none of its" in capsys.readouterr().out
    assert command(monkeypatch, "--cut", target + "as_searched") == 0
    assert capsys.readouterr().out.startswith("ok: dynamic_programming on 4 devices")
    assert command(monkeypatch, target + "as_nothing") == 1
    assert "returns NoneType" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "--devices", "4", "verify_model:as_tuple") == 0


@pytest.mark.parametrize(
    "target, message",
    [
        ("nowhere.py", "no such script"),
        ("nowhere.py:f", "no such file"),
        ("no.where:f", "no such module"),
        ("shardwright:nothing", "no function"),
    ],
)
def test_nothing_to_verify(monkeypatch, capsys, target, message):
    assert command(monkeypatch, target) == 2
    assert message in capsys.readouterr().err


def test_scripts_that_call_no_model_or_fail(monkeypatch, capsys, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.exit(0)\n")
    assert command(monkeypatch, str(script)) == 2
    assert "without a call" in capsys.readouterr().err
    script.write_text("import sys\nsys.exit(7)\n")
    assert command(monkeypatch, str(script)) == 7
    script.write_text(MODEL + FAILS)
    assert command(monkeypatch, "--devices", "2", str(script)) == 1
    captured = capsys.readouterr()
    assert "layer" in captured.err and "caught" not in captured.out


def test_an_overflow_on_one_device_is_no_difference():
    """Sums that overflow in float32 are infinite or not by the order of their terms."""
    net, x, y = nn.Linear(64, 64), torch.zeros(64, 64), torch.zeros(64, 64)
    rows = torch.tensor([0, 1, 32, 33])  # two of one rank, two of another
    x[rows, 0], y[rows] = 1500.0, torch.tensor([-3e38, -3e38, 3e38, 3e38])[:, None]

    def verified(*dtypes):
        loss_fn, mode = nn.MSELoss(), "data_parallel"
        return sw.verify(net, (x,), y, loss_fn=loss_fn, devices=4, parallel_mode=mode, steps=1, dtypes=dtypes)

    for dtypes in ((torch.float64, torch.float32), (torch.float32, torch.float64)):
        report = verified(*dtypes)
        exact, single = report.differences
        assert report.ok and not exact.overflow and single.overflow
        assert "float32: the results on one device are not finite, those in float64 are" in report.summary()
    assert verified(torch.float32).ok == single.gradients.ok  # the order of sums in this machine's product decides


def test_shards_are_not_taken_for_earlier_ones_of_the_same_id():
    """Later shards of one name replace the earlier ones, and a shard that dies may hand its id on."""
    comparison, placed = SimpleNamespace(seen={}, made={}), SimpleNamespace(layout=Layout.replicated(1, 1))
    leaf, kept = torch.ones(2, requires_grad=True), []
    for _ in range(20):
        Comparison.keep(comparison, "x", [leaf * 2], None, placed)
        kept.append(comparison.made["x"][0][0].retains_grad)
        comparison.made.clear()
    assert kept == [True] * 20
