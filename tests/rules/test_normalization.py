"""Batch norms that train: by the whole batch's statistics, or each device by its own, and the running ones."""

import copy

import pytest
import torch
from data_parallel_by_hand import assert_as_copies
from one_device import assert_as_one_device, close, parallel
from rule_reference import Case, Sliced, Whole
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.layout import Digit
from shardwright.rules import bound_rule, find_rule

aten = torch.ops.aten

FAR = 1e6


def batch(*shape: int, seed: int = 0, mean: float = 0.0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2 + 1 + mean


class Block(nn.Module):
    """Two batch norms with a product between; parts of a batch differ in their statistics."""

    def __init__(self, first: nn.Module | None = None, **settings) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = first or nn.BatchNorm1d(6, **settings)
        self.fc = nn.Linear(6, 4)
        self.second = nn.BatchNorm1d(4, **settings)
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.uniform_(0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.fc(self.first(x))))


SETTINGS = [{}, {"momentum": None}, {"momentum": 0.7, "eps": 0.3}, {"affine": False}, {"track_running_stats": False}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"dataset": "data_parallel"}, {"mode": "data_parallel", "sync_batch_norm": True, "dataset": "data_parallel"}],
    ids=["full_batch", "parts", "data_parallel"],
)
def test_whole_batch_statistics(settings: dict, options: dict) -> None:
    """Outputs, gradients, running statistics and the count of batches, over three steps."""
    batches = [(batch(8, 6, seed=s) + torch.arange(8.0).double()[:, None],) for s in range(3)]
    assert_as_one_device(Block(**settings), *batches, devices=4, **options)


@pytest.mark.parametrize(
    ("shape", "cuts", "devices"),
    [
        ((4, 4, 6, 4), (1, 1, 2, 2), 4),
        ((4, 4, 6, 4), (2, 1, 3, 1), 6),
        ((4, 4, 6, 4), (2, 2, 1, 1), 8),
        ((4, 4), (1, 4), 4),
        ((4, 4, 6), (2, 2, 3), 12),
    ],
)
def test_marked(shape: tuple, cuts: tuple, devices: int) -> None:
    """Cut by batch, channels and places; where channels are cut, each rank's new statistics are gathered."""

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = (nn.Parameter(batch(4, seed=s)) for s in (5, 6))
            self.register_buffer("mean", batch(4, seed=7))
            self.register_buffer("var", batch(4, seed=8).abs())
            channels = (cuts[1],)
            self.norm = sw.shard(F.batch_norm, in_strategy=(cuts, *[channels] * 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x, self.mean, self.var, self.weight, self.bias, training=True, momentum=0.3)

    apart = torch.arange(4.0).double().reshape(4, *[1] * (len(shape) - 1))
    batches = [(batch(*shape, seed=s) + apart,) for s in (1, 2)]
    model = assert_as_one_device(Marked(), *batches, devices=devices)
    layout = model.plan.parameters["weight"].layout
    assert layout.cuts == (cuts[1],) and model.plan.parameters["mean"].layout.is_replicated


def test_a_marked_module() -> None:
    """Input, weight, bias, then the running statistics; its count of batches is no operator that a mark could mean."""
    net = Block()
    sw.shard(net.first, in_strategy=((2, 2), (2,), (2,), (2,), (2,)))
    model = assert_as_one_device(net, (batch(8, 6),), (batch(8, 6, seed=1),), devices=4)
    operator = model.plan.operator("first")
    assert operator.op == "batch_norm" and operator.in_strategy == ((2, 2), (2,), (2,), (2,), (2,))
    assert model.plan.parameters["first.weight"].layout.cuts == (2,)


def test_one_exchange_forward_and_one_backward() -> None:
    plan = sw.plan(
        nn.BatchNorm2d(4), (torch.empty(8, 4, 2, 2, requires_grad=True),), devices=8, dataset_strategy="data_parallel"
    )
    mine = [c for c in plan.collectives(5) if c.operator == "batch_norm"]
    assert [(c.op, c.phase, c.shape) for c in mine if c.phase != "gradient"] == [
        ("all_gather", "forward", (1, 2, 1, 4, 1, 1)),
        ("all_reduce", "backward", (2, 1, 4, 1, 1)),
    ]
    assert sorted(c.shape for c in mine if c.phase == "gradient") == [(4,), (4,)]
    assert all(c.ranks == tuple(range(8)) for c in mine)


def test_channels_alone_cut_need_no_exchange_but_for_the_buffers() -> None:
    plan = sw.plan(
        nn.BatchNorm1d(8), (torch.empty(4, 8),), devices=4, marks={"batch_norm": ((1, 4), (4,), (4,), (4,), (4,))}
    )
    mine = [c for c in plan.collectives(1) if c.operator != "output"]
    assert [(c.op, c.operator) for c in mine] == [("all_gather", "running_mean"), ("all_gather", "running_var")]


def test_a_mean_far_from_zero_cancels_nothing() -> None:
    """Sums of squares would leave no digit of this variance."""
    net, x = nn.BatchNorm1d(3), batch(8, 3, mean=1e4).float()
    one = copy.deepcopy(net)
    model = parallel(net, devices=8)
    torch.testing.assert_close(model(x), one(x), rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(net.running_var, one.running_var, rtol=1e-5, atol=0)
    far = batch(8, 3, mean=FAR)
    one, net = (nn.BatchNorm1d(3).double() for _ in range(2))
    torch.testing.assert_close(parallel(net, devices=4)(far), one(far), rtol=1e-8, atol=1e-8)


def test_train_and_eval() -> None:
    """Evaluation uses the running statistics of the steps before, and leaves them alone."""
    net = Block()
    one = copy.deepcopy(net)
    model = parallel(net, devices=4)
    for step, training in enumerate((True, False, True, False)):
        x = batch(8, 6, seed=step)
        close(model.train(training)(x), one.train(training)(x), f"step {step}")
        close(dict(net.state_dict()), dict(one.state_dict()), f"state after step {step}")
    assert one.first.num_batches_tracked == 2
    assert not [c for c in model.plan.collectives(0) if c.phase == "forward" and c.operator != "output"]


def test_a_layer_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(torch.tanh(self.norm(x)))

    assert_as_one_device(Twice(), (batch(8, 6),), (batch(8, 6, seed=1),), devices=4)
    after = assert_as_copies(Twice(), [(batch(8, 6), batch(8, 6, seed=1))], squares_loss, 2)
    assert after["norm.num_batches_tracked"] == 2


# -- each device's own -------------------------------------------------------------------------------------------------


def squares_loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((y - 0.3) ** 3).mean() + (y[:, 0] * target[:, 0]).mean()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_own_statistics(settings: dict) -> None:
    """The same as copies of the network with a part of the batch each, gradients and running statistics averaged."""
    batches = [(batch(12, 6, seed=s) + torch.arange(12.0).double()[:, None], batch(12, 1, seed=s)) for s in range(3)]
    assert_as_copies(Block(**settings), batches, squares_loss, 4)


def test_own_statistics_differ_from_the_whole_batch() -> None:
    x = batch(8, 6) + torch.arange(8.0).double()[:, None]
    own, whole = (
        parallel(Block(), devices=4, mode="data_parallel", dataset="data_parallel", sync_batch_norm=sync)
        for sync in (False, True)
    )
    assert (own(x) - whole(x)).abs().max() > 0.1


def test_own_statistics_need_one_exchange_for_all_layers() -> None:
    plan = sw.plan(
        Block().float(),
        (torch.empty(8, 6),),
        parallel_mode="data_parallel",
        devices=4,
        dataset_strategy="data_parallel",
    )
    exchanged = [c for c in plan.collectives(1) if c.phase in ("forward", "backward")]
    assert [(c.op, c.shape, c.ranks) for c in exchanged] == [("all_reduce", (2, 10), (0, 1, 2, 3))]
    assert plan.operator("first").op == "own_batch_norm"
    assert plan.parameters["first.running_var"].layout.is_replicated


def test_own_statistics_of_one_value_are_refused() -> None:
    with pytest.raises(sw.StrategyError, match="one value a channel") as raised:
        sw.plan(Block().float(), (torch.empty(4, 6),), parallel_mode="data_parallel", devices=4)
    assert "sync_batch_norm=True" in str(raised.value) and "test_normalization.py" in str(raised.value)
    sw.plan(Block().float(), (torch.empty(4, 6),), parallel_mode="data_parallel", devices=4, sync_batch_norm=True)


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto"])
def test_verify_compares_what_can_be_compared(mode: str) -> None:
    report = sw.verify(Block(), (batch(8, 6),), devices=4, parallel_mode=mode, steps=2, dtypes=(torch.float64,))
    assert report.ok, report


def test_a_fed_tensor_whose_batch_is_elsewhere_is_normalised_whole() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x.transpose(0, 1))

    assert_as_one_device(Turned(), (batch(8, 4),), devices=4, mode="data_parallel")


@pytest.mark.parametrize("mode", ["semi_auto", "data_parallel"])
def test_instance_norm_has_one_meaning(mode: str) -> None:
    net = nn.Sequential(nn.InstanceNorm1d(4, affine=True, track_running_stats=True), nn.GroupNorm(2, 4)).double()
    assert_as_one_device(net, (batch(8, 4, 6),), (batch(8, 4, 6, seed=1),), devices=4, mode=mode)


def test_which_digits_cut_what() -> None:
    """First named, most major: batch, then channels."""
    plan = sw.plan(
        nn.BatchNorm1d(8), (torch.empty(8, 8),), devices=8, marks={"batch_norm": ((4, 2), (2,), (2,), (2,), (2,))}
    )
    operator = plan.operator("batch_norm")
    assert operator.in_layouts[0].dims == ((Digit(4, 2),), (Digit(2, 1),))
    assert operator.out_strategy == ((4, 2), (2,), (2,))


# -- half precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("target", "shape", "cut", "args"),
    [
        (aten.layer_norm.default, (2, 4096), "d1", lambda one: ([4096], one, None)),
        (aten.rms_norm.default, (2, 4096), "d1", lambda one: ([4096], one)),
        (aten.group_norm.default, (2, 2, 4096), "s0", lambda one: (2, one, one)),
        (aten.instance_norm.default, (2, 2, 4096), "s0", lambda one: (None, None, None, None, True, 0.1, 1e-5, False)),
        (aten.batch_norm.default, (4096, 2), "n", lambda one: (one, one, None, None, True, 0.1, 1e-5, False)),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_half_precision_is_summed_wide(dtype: torch.dtype, target, shape: tuple, cut: str, args) -> None:
    """Sums of these are beyond float16, and their mean is no number that bfloat16 could add up to."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) + 60).to(dtype)
    channels = shape[-1] if len(shape) == 2 else shape[1]
    one = torch.linspace(0.5, 1.5, channels).to(dtype)
    whole = Whole(Case(0, target, (x.requires_grad_(), *args(one.requires_grad_())), {}))
    rule = find_rule(whole.op)
    bound = bound_rule(whole.op, rule)
    at = [f.name for f in bound.factors].index(cut)
    run = Sliced(whole, rule, bound, bound.cut_by(4, {at: (Digit(4, 1),)}), keep_open=False)
    assert len(run.ran) > 1
    expected = target(x.detach().double(), *args(one.detach().double()))
    made = run.outputs()[0]
    assert made.dtype == dtype and torch.isfinite(made).all()
    torch.testing.assert_close(made.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
    for name, gradient in run.gradients().items():
        wanted = whole.gradients[name]
        assert gradient.dtype == wanted.dtype
        torch.testing.assert_close(gradient.double(), wanted.double(), rtol=0.05, atol=float(wanted.abs().max()) * 0.02)


@pytest.mark.parametrize("shape", [(8, 8), (4, 8, 3), (2, 8, 3, 3)], ids=str)
@pytest.mark.parametrize("devices", [2, 4])
def test_group_norm_of_one_group(shape, devices):
    """Ranks are one more dim before all others to the local runtime; the batch is not normalised over for that."""

    class Net(nn.Module):
        def forward(self, x):
            return F.group_norm(x, 1)

    dataset = "data_parallel" if shape[0] >= devices else "full_batch"
    assert_as_one_device(Net(), (batch(*shape),), devices=devices, dataset=dataset)
