"""Mixed precision in one process: every mode, level and schedule, beside the same casts on one device in plain PyTorch.

What is computed in float32 from stored float64, and in float64, shows the mechanism to the last digits; bfloat16 and
float16 are what it is for.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp
import torch.nn.functional as F
from mixed_precision_reference import APART, Net, apart, assert_trains_alike, batches, loss_of, reference
from one_device import parallel
from pipeline_networks import Chain, setting
from small_networks import D, draw
from torch import Tensor, nn

import shardwright as sw
from shardwright.partition.local_program import Redistribute
from shardwright.runtime.local import local_executor

BF16 = sw.MixedPrecision(torch.bfloat16, torch.float32, torch.float32)
#: (policy, the type in which parameters are stored)
POLICIES = {
    "bfloat16": (BF16, torch.float32),
    "bfloat16, summed in it": (sw.MixedPrecision(torch.bfloat16, output_dtype=torch.float32), torch.float32),
    "float32 of float64": (sw.MixedPrecision(torch.float32, torch.float64, torch.float64), D),
    "float64": (sw.MixedPrecision(D), D),
    "float64 of float32": (sw.MixedPrecision(D), torch.float32),
}

#: Devices so slow, and links so quick, that a search cuts a model as small as these.
RATES = dict.fromkeys(("float64", "float32", "bfloat16", "float16"), 1e6)
SLOW = sw.Cluster("slow", (sw.Level("near", 2, 1e9, 1e-9), sw.Level("far", 4, 1e8, 1e-9)), 1e9, RATES, 1e9, 1e-9)
TWO = sw.Cluster("two", (sw.Level("near", 2, 1e9, 1e-9),), 1e9, RATES, 1e9, 1e-9)


def within(policy: sw.MixedPrecision, stored: torch.dtype) -> float:
    return max(APART[policy.param_dtype or stored], APART[stored] * 10)


def train(
    name: str, mode: str = "semi_auto", *, devices: int = 8, hsdp: str | None = None, steps: int = 3, **options: Any
) -> sw.AutoParallel:
    policy, stored = POLICIES[name]
    net = Net(stored, marks=devices if mode in ("semi_auto", "sharding_propagation") else 0)
    one = copy.deepcopy(net)
    model = parallel(
        net,
        loss_of,
        devices=devices,
        mode=mode,
        mixed_precision=policy,
        **options,
        cluster=SLOW if devices == 8 else None,
        dataset="full_batch" if mode != "hybrid_parallel" else "data_parallel",
    )
    if hsdp is not None:
        model.hsdp(threshold=0, optimizer_level=hsdp)
    assert_trains_alike(model, net, one, policy, batches(stored, steps), within(policy, stored))
    return model


MODES = (
    "stand_alone",
    "hybrid_parallel",
    "data_parallel",
    "semi_auto",
    "sharding_propagation",
    "recursive_programming",
    "dynamic_programming",
)


@pytest.mark.parametrize(
    "name, mode",
    [
        *((name, mode) for name in ("bfloat16", "float32 of float64") for mode in MODES),
        *(
            (name, mode)
            for name in ("bfloat16, summed in it", "float64", "float64 of float32")
            for mode in ("data_parallel", "semi_auto")
        ),
    ],
)
def test_every_mode_trains_as_one_device(name: str, mode: str) -> None:
    model = train(name, mode)
    if mode not in ("stand_alone", "hybrid_parallel"):
        cut = [o for o in model.plan.operators if any(layout.carried for layout in o.in_layouts)]
        assert len(cut) > len(model.plan.operators) / 2


@pytest.mark.parametrize("level", ["level1", "level2", "level3"])
@pytest.mark.parametrize(
    "mode, name",
    [("data_parallel", "bfloat16"), ("semi_auto", "float32 of float64"), ("dynamic_programming", "float32 of float64")],
)
def test_optimizer_parallel_at_every_level(mode: str, name: str, level: str) -> None:
    train(name, mode, hsdp=level, devices=4, steps=2)


def test_types_that_the_model_sees() -> None:
    """Parameters and inputs have `param_dtype` where the model is captured, buffers their own; nothing of the model
    stays so."""

    class Seen(Net):
        def forward(self, x: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
            return self.up.weight * 1, offset * 1, self.scale * 1, super().forward(x, offset)

    net, inputs = Seen(), batches(torch.float32)[0][:2]
    model = parallel(net, None, devices=4, mixed_precision=replace(BF16, output_dtype=None))
    assert [y.dtype for y in model(*inputs)][:3] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert {p.dtype for p in net.parameters()} == {torch.float32} == {b.dtype for b in net.buffers()}
    uncast = {"param_dtype": torch.bfloat16, "cast_forward_inputs": False}
    plan = sw.plan(Seen(), inputs, devices=4, mixed_precision=uncast)
    assert [v.dtype for v in plan.graph.outputs][:3] == [torch.bfloat16, torch.float32, torch.float32]
    plan = sw.plan(Net(), inputs, loss_of, batches(torch.float32)[0][2], devices=4, mixed_precision=uncast)
    assert [o.op for o in plan.operators][:2] == ["embedding", "unsqueeze"]  # the input is not cast


def test_a_mark_names_its_operator() -> None:
    plan = train("bfloat16", "semi_auto").plan
    assert plan.operator("up").op == plan.operator("down").op == "linear"
    assert plan.operator("up").in_strategy == ((2, 1, 1), (4, 1), (4,))
    assert plan.parameters["up.weight"].layout.cuts == plan.parameters["up.weight"].storage.cuts == (4, 1)
    assert [o.op for o in plan.operators].count(
        "to"
    ) == 3  # the input's, the result's, and the one that the model writes


def test_parameters_that_are_each_ranks_own() -> None:
    """hybrid_parallel with layerwise parameters: each rank's slice is cast as the others are."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = sw.layerwise_parallel(lambda rank: draw(16, 4, seed=rank))
            self.v = nn.Parameter(draw(16, 16, seed=7))

        def forward(self, x: Tensor) -> Tensor:
            assert self.w.dtype == self.v.dtype == torch.float32
            return sw.ops.all_gather(x @ self.v @ self.w, dim=1)

    policy = sw.MixedPrecision(torch.float32, D, D)
    sw.init(devices=4)
    net = Own()
    x, y = draw(8, 16, seed=1), draw(8, 16, seed=2)
    model = parallel(net, nn.MSELoss(), devices=4, mode="hybrid_parallel", mixed_precision=policy)
    loss = model(x, y)
    loss.backward()
    w, v = net.w.detach().clone().requires_grad_(), net.v.detach().clone().requires_grad_()
    expected = F.mse_loss(torch.cat([x.float() @ v.float() @ own.float() for own in w], 1).double(), y)
    expected.backward()
    assert apart(loss, expected) < 1e-6 and net.w.grad.dtype == net.v.grad.dtype == D
    assert apart(net.v.grad, v.grad) < 1e-5 and apart(net.w.grad, w.grad) < 1e-5


def test_what_is_sent_is_what_the_policy_says() -> None:
    """Weights are gathered after the cast, gradients summed in `reduce_dtype`: type by type, to the byte."""
    x, y = torch.zeros(8, 64), torch.zeros(8, 64)

    def sent(policy: Any, level: str | None) -> dict[tuple[str, str], int]:
        plan = sw.plan(
            nn.Linear(64, 64, bias=False),
            (x,),
            F.mse_loss,
            y,
            devices=4,
            parallel_mode="data_parallel",
            dataset_strategy="full_batch",
            hsdp=level and {"threshold": 0, "optimizer_level": level},
            mixed_precision=policy,
        )
        out: dict[tuple[str, str], int] = {}
        for c in plan.collectives(0):
            if c.cause == "parameter":
                out[c.phase, c.op] = out.get((c.phase, c.op), 0) + c.bytes
        prices = {(c.phase, c.kind): c.bytes for c in plan.price.collectives if c.phase in ("storage", "gradient")}
        assert prices.keys() == out.keys()
        return out

    size = 64 * 64
    for level, scattered in ((None, "all_reduce"), ("level1", "reduce_scatter"), ("level3", "reduce_scatter")):
        for policy, gathered, summed in (
            (None, 4, 4),
            (torch.bfloat16, 2, 2),
            (BF16, 2, 4),
            (sw.MixedPrecision(reduce_dtype=torch.bfloat16), 4, 2),
        ):
            times = (
                {None: 0, "level1": 1, "level3": 2}[level] if level != "level3" else 1
            )  # its backward wants no weight
            expected = {("gradient", scattered): size * summed}
            if times:
                expected["storage", "all_gather"] = size // 4 * gathered
            assert sent(policy, level) == expected, (level, policy)


def test_memory_and_price_of_a_plan() -> None:
    """Parameters, gradients and the optimizer's state are the stored type's; the search prices what the plan costs."""
    given = dict(
        loss_fn=loss_of,
        targets=batches(torch.float32)[0][2],
        devices=2,
        parallel_mode="dynamic_programming",
        cluster=TWO,
    )
    inputs = batches(torch.float32)[0][:2]
    for hsdp in (None, {"threshold": 0}, {"threshold": 0, "optimizer_level": "level3"}):
        plain = sw.plan(Net(tied=False), inputs, hsdp=hsdp, **given)
        mixed = sw.plan(Net(tied=False), inputs, hsdp=hsdp, mixed_precision=BF16, **given)
        for plan in (plain, mixed):
            held = plan.memory(0)
            elements = sum(torch.Size(p.local_shape(0)).numel() for p in plan.parameters.values() if p.trainable)
            assert held["gradients"] == 4 * elements and held["optimizer"] == 8 * elements
            assert held["parameters"] == 4 * (elements + 16)
            # The search counts a backward for each use; of a bias that one operator reads twice, one has none.
            assert plan.cost * (1 - 1e-9) <= plan.found.cost <= plan.cost * (1 + 1e-5)
            assert plan.peak >= held["parameters"] + held["gradients"] + held["optimizer"]
        assert "gathered" in mixed.memory(0)  # the casts
        casts = [i for i in mixed.program.instructions if isinstance(i, Redistribute) and i.casts]
        assert {i.source.value.name for i in casts} == {v.name for v in mixed.graph.parameters.values()}


def test_a_search_within_memory_reckons_with_the_stored_type() -> None:
    given = dict(
        loss_fn=loss_of,
        targets=batches(torch.float32)[0][2],
        devices=2,
        parallel_mode="dynamic_programming",
        cluster=TWO,
        mixed_precision=BF16,
    )
    inputs = batches(torch.float32)[0][:2]
    loose = sw.plan(Net(tied=False), inputs, **given)
    tight = sw.plan(Net(tied=False), inputs, memory=loose.peak * 0.9, **given)
    assert tight.peak <= loose.peak * 0.9
    with pytest.raises(sw.PlanError, match="no plan fits in 200 bytes"):
        sw.plan(Net(tied=False), inputs, memory=200, **given)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"])
def test_pipelines_of_every_schedule(name: str) -> None:
    for precision, tied in (
        ("bfloat16", False),
        ("float32 of float64", name in ("1f1b", "interleaved")),
        ("float64", False),
    ):
        if precision != "float64" or name == "1f1b":
            policy, stored = POLICIES[precision]
            net = Chain(tied=tied, skip=tied).to(stored)
            one = copy.deepcopy(net)
            model = parallel(net, nn.MSELoss(), devices=4, mixed_precision=policy).pipeline(**setting(name, 4))
            given = [
                (draw(16, 16, seed=i).to(stored), draw(16, 16, seed=i + 9).to(policy.output_dtype or stored))
                for i in range(2)
            ]
            assert_trains_alike(model, net, one, policy, given, within(policy, stored), nn.functional.mse_loss)
            crossing = {t.value.dtype for t in model.plan.transfers if t.kind == "value"}
            assert crossing == {policy.param_dtype}


@pytest.mark.parametrize("level", ["level1", "level3"])
def test_pipelines_whose_parameters_are_stored_cut(level: str) -> None:
    policy, stored = POLICIES["float32 of float64"]
    net = Chain().to(stored)
    one = copy.deepcopy(net)
    model = (
        parallel(net, nn.MSELoss(), devices=4, mode="data_parallel", mixed_precision=policy)
        .hsdp(threshold=0, optimizer_level=level)
        .pipeline(**setting("1f1b", 2))
    )
    given = [(draw(16, 16, seed=i), draw(16, 16, seed=i + 9)) for i in range(2)]
    assert_trains_alike(model, net, one, policy, given, 2e-6, nn.functional.mse_loss)


def test_recomputed_dropped_out_and_uneven() -> None:
    """Further things that a model may ask for: random numbers are those of one device under the same policy."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.body = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Dropout(0.5), nn.Linear(10, 6))
            sw.recompute(self.body)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    for policy in (BF16, sw.MixedPrecision(torch.float32, D, D)):
        stored = D if policy is not BF16 else torch.float32
        made = []
        for mode in ("stand_alone", "data_parallel", "semi_auto"):
            net = Dropping().to(stored)
            if mode == "semi_auto":
                sw.shard(net.body[0], ((1, 1), (4, 1)))
            model = parallel(net, nn.MSELoss(), devices=4, mode=mode, mixed_precision=policy, uneven=True)
            torch.manual_seed(8)
            loss = model(draw(8, 6).to(stored), draw(8, 6, seed=2).to(stored))
            loss.backward()
            made.append((loss.detach(), *(p.grad for p in net.parameters())))
        for other in made[1:]:
            for a, b in zip(made[0], other):
                assert a.dtype == stored and apart(a, b) < APART[policy.param_dtype], mode


def test_values_that_are_no_floating_parameters() -> None:
    """Integer and complex parameters keep their type, floating ones that are wider are cast, buffers stay."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.wide, self.w = nn.Parameter(torch.randn(8, 8, dtype=D)), nn.Parameter(torch.randn(8, 8))
            self.place = nn.Parameter(torch.arange(8).flip(0), requires_grad=False)
            self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))
            self.loss_scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            y = (x @ self.wide + x @ self.w)[:, self.place]
            return y * (self.phase * self.phase.conj()).real.to(y.dtype) * self.loss_scale

    policy = sw.MixedPrecision(torch.float32)
    net = Odd()
    one = copy.deepcopy(net)
    model = parallel(net, nn.MSELoss(), devices=4, mode="data_parallel", mixed_precision=policy)
    x, y = draw(8, 8).float(), draw(8, 8, seed=3).float()
    loss = model(x, y)
    state = {n: p.float() if p.dtype == D else p for n, p in one.named_parameters()}
    expected = F.mse_loss(torch.func.functional_call(one, state, (x,)), y)
    loss.backward(), expected.backward()
    assert apart(loss, expected) < 1e-6
    for (name, p), q in zip(net.named_parameters(), one.parameters()):
        assert p.dtype == q.dtype and (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            assert p.grad.dtype == p.dtype and (p.grad - q.grad).abs().max() <= 1e-5 * q.grad.abs().max(), name


def convolutional() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 8)
    )


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto"])
def test_batch_norms_keep_the_type_of_their_statistics(mode: str) -> None:
    net = convolutional()
    one = copy.deepcopy(net)
    policy = sw.MixedPrecision(torch.bfloat16, output_dtype=torch.float32)
    model = parallel(net, nn.MSELoss(), devices=4, mode=mode, mixed_precision=policy, sync_batch_norm=True).hsdp(
        threshold=0
    )
    optimizers = [torch.optim.SGD(n.parameters(), 0.05) for n in (net, one)]
    for step in range(3):
        x, y = draw(8, 3, 4, 4, seed=step).float(), draw(8, 8, seed=9).float()
        state = {n: p.bfloat16() for n, p in one.named_parameters() if not n.startswith("1.")}
        loss, expected = model(x, y), F.mse_loss(torch.func.functional_call(one, state, (x.bfloat16(),)).float(), y)
        assert loss.dtype == torch.float32 and apart(loss, expected) < APART[torch.bfloat16]
        loss.backward(), expected.backward()
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    for (name, held), other in zip(net.state_dict().items(), one.state_dict().values()):
        assert held.dtype == other.dtype and apart(held.double(), other.double()) < APART[torch.bfloat16], name
    values = model.plan.graph.parameters
    assert values["1.weight"].dtype == torch.float32 and values["0.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("stored, computed", [(D, torch.float32), (D, torch.bfloat16), (torch.float32, D)], ids=str)
def test_statistics_that_torch_takes_beside_nothing_else(stored: torch.dtype, computed: torch.dtype) -> None:
    with pytest.raises(sw.SettingError, match="1 has running statistics of") as caught:
        sw.plan(convolutional().to(stored), (draw(8, 3, 4, 4).to(stored),), devices=4, mixed_precision=computed)
    assert "16 bits" in caught.value.legal


def test_parameters_of_the_loss_keep_their_type() -> None:
    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((16,), 0.5))

        def forward(self, y: Tensor, target: Tensor) -> Tensor:
            assert y.dtype == torch.float32 == self.weight.dtype
            return ((y * self.weight - target) ** 2).mean()

    net, loss_fn = nn.Linear(16, 16), Weighed()
    model = parallel(net, loss_fn, devices=4, mode="data_parallel", mixed_precision=BF16)
    model(draw(8, 16).float(), draw(8, 16, seed=1).float()).backward()
    assert model.plan.graph.parameters["loss_fn.weight"].master is None
    assert model.plan.graph.parameters["weight"].master == (torch.float32, torch.float32)
    assert loss_fn.weight.grad.dtype == net.weight.grad.dtype == torch.float32


def test_plans_as_documents(tmp_path) -> None:
    """A plan that is saved says in which types it is; loaded, it costs and sends what it did, and runs on a model."""
    model = train("bfloat16", hsdp="level1", devices=4)
    model.save_operator_strategy_file(tmp_path / "plan.json")
    model.save_param_strategy_file(tmp_path / "parameters.json")
    loaded = sw.Plan.load(tmp_path / "plan.json")
    assert loaded.fingerprint == model.plan.fingerprint and loaded.cost == pytest.approx(model.plan.cost)
    assert loaded.collectives(1) == model.plan.collectives(1)
    assert '"dtype": "float32"' in (tmp_path / "parameters.json").read_text()
    net = Net(marks=4)
    again = parallel(net, loss_of, devices=4, mixed_precision=BF16).hsdp(threshold=0)
    again.load_param_strategy_file(tmp_path / "parameters.json")
    again(*batches(torch.float32)[0]).backward()
    assert again.plan.parameters["up.weight"].storage == model.plan.parameters["up.weight"].storage
    other = sw.plan(
        Net(marks=4),
        batches(torch.float32)[0][:2],
        loss_of,
        batches(torch.float32)[0][2],
        devices=4,
        hsdp={"threshold": 0},
        mixed_precision=sw.MixedPrecision(torch.bfloat16),
    )
    assert other.fingerprint != model.plan.fingerprint


def test_dumps_and_tables_show_the_casts(tmp_path, capsys) -> None:
    model = train("bfloat16", hsdp="level3", devices=4, save_graphs=tmp_path)
    text = (tmp_path / "rank_0" / "execute.ir").read_text()
    assert "# parameter %up.weight  f32[32, 16]" in text
    assert any(
        line.split("=")[1].startswith(" to(%up.weight)") and "f32" in line and "-> bf16" in line
        for line in text.splitlines()
        if "to(%up.weight)" in line
    )
    gathers = [line for line in text.splitlines() if "all_gather(" in line and "up.weight" in line]
    assert gathers and all("bf16" in line and "f32" not in line for line in gathers)
    scatters = [line for line in text.splitlines() if "reduce_scatter(" in line and "gradient of up.weight" in line]
    assert scatters and all("f32" in line and "bf16" not in line for line in scatters)
    model.explain()
    assert "up.weight" in capsys.readouterr().out


def test_a_checkpoint_holds_the_master_weights(tmp_path) -> None:
    """Saved under one plan, loaded under another on another number of devices and into the plain model: to the bit."""
    model = train("bfloat16", hsdp="level1", devices=8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(*batches(torch.float32)[0]).backward()
    optimizer.step()
    sw.save_checkpoint(model, optimizer, tmp_path / "run", step=3)
    held = {name: p.detach().clone() for name, p in model.net.named_parameters()}
    assert not any(torch.equal(p, p.bfloat16().float()) for name, p in held.items() if p.dim() > 1)
    net = Net()
    other = parallel(net, loss_of, devices=4, mode="data_parallel", mixed_precision=BF16)
    other.hsdp(threshold=0, optimizer_level="level3")
    theirs = torch.optim.AdamW(net.parameters())
    sw.load_checkpoint(other, theirs, tmp_path / "run")
    other(*batches(torch.float32)[1])
    assert all(torch.equal(p, held[name]) for name, p in net.named_parameters())
    plain = Net()  # without a policy
    model = parallel(plain, loss_of, devices=2)
    sw.load_checkpoint(model, path=tmp_path / "run")
    model(*batches(torch.float32)[1])
    assert all(torch.equal(p, held[name]) for name, p in plain.named_parameters())


def test_gradients_accumulate_in_the_stored_type() -> None:
    """The sum of two backwards is what float32 holds of it: as one device accumulates."""
    net = Net()
    one = copy.deepcopy(net)
    model = parallel(net, loss_of, devices=4, mode="data_parallel", mixed_precision=BF16)
    for batch in batches(torch.float32):
        model(*batch).backward()
        loss_of(reference(one, BF16, *batch[:-1]), batch[-1]).backward()
    for p, q in zip(net.parameters(), one.parameters()):
        assert p.grad.dtype == torch.float32 and apart(p.grad, q.grad) < APART[torch.bfloat16]


def test_verify_compares_under_the_policy(monkeypatch) -> None:
    given = dict(loss_fn=loss_of, devices=4, steps=2, dtypes=(D,))
    inputs, target = batches(torch.float32)[0][:2], batches(torch.float32)[0][2]
    for policy, most in ((sw.MixedPrecision(D), 1e-10), (sw.MixedPrecision(torch.float32, D, D), 1e-3), (BF16, 0.1)):
        report = sw.verify(Net(marks=4), inputs, target, mixed_precision=policy, **given)
        assert report.ok and report.max_loss_difference < most and report.differences[0].tolerance <= most
    pipe = sw.verify(
        Chain(),
        (draw(16, 16),),
        draw(16, 16, seed=2),
        loss_fn=nn.MSELoss(),
        devices=4,
        steps=2,
        dtypes=(D,),
        pipeline=setting("1f1b", 2),
        mixed_precision=sw.MixedPrecision(D, D),
    )
    assert pipe.ok
    right = local_executor.convert_shards

    def wrong_sums(redistribution: Any, shards: Tensor, run: Any) -> Tensor:
        made = right(redistribution, shards, run)
        return (
            made * 2 if made.dtype == D and redistribution.source.partial else made
        )  # of a gradient, in the type of sums

    monkeypatch.setattr(local_executor, "convert_shards", wrong_sums)
    wrong = sw.verify(Net(marks=4), inputs, target, mixed_precision=sw.MixedPrecision(torch.float32, D, D), **given)
    assert not wrong.ok


# -- what is said ------------------------------------------------------------------------------------------------------


def test_what_a_policy_is_made_of() -> None:
    made = sw.MixedPrecision(torch.bfloat16, torch.float32)
    assert sw.AutoParallel(Net(), mixed_precision=made).settings.mixed_precision is made
    given = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert sw.AutoParallel(Net(), mixed_precision=given).settings.mixed_precision == made
    assert (
        sw.AutoParallel(
            Net(), mixed_precision=dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        ).settings.mixed_precision
        == made
    )
    assert sw.AutoParallel(Net(), mixed_precision=torch.float16).settings.mixed_precision == sw.MixedPrecision(
        torch.float16
    )
    assert sw.AutoParallel(Net()).settings.mixed_precision is None
    assert sw.MixedPrecision.of(fsdp.MixedPrecisionPolicy()) == sw.MixedPrecision()

    @dataclass(frozen=True)
    class MixedPrecisionPolicy(fsdp.MixedPrecisionPolicy):  # of a later torch
        further: str = "no"

    assert sw.MixedPrecision.of(MixedPrecisionPolicy(torch.bfloat16, torch.float32)) == made
    with pytest.raises(sw.SettingError, match="further"):
        sw.MixedPrecision.of(MixedPrecisionPolicy(torch.bfloat16, further="yes"))
    with pytest.raises(AttributeError):
        made.param_dtype = torch.float32  # type: ignore[misc]


def test_a_policy_that_says_nothing_changes_nothing() -> None:
    batch = batches(torch.float32)[0]
    plans = [
        sw.plan(Net(), batch[:2], loss_of, batch[2], devices=4, mixed_precision=policy)
        for policy in (None, sw.MixedPrecision(), sw.MixedPrecision(torch.float32, torch.float32, torch.float32))
    ]
    assert len({plan.fingerprint for plan in plans}) == 1


@pytest.mark.parametrize(
    "given, text",
    [
        ("bf16", "mixed_precision='bf16'"),
        ({"dtype": torch.bfloat16}, "dtype"),
        (torch.int8, "param_dtype=torch.int8"),
        ({"reduce_dtype": torch.bool}, "reduce_dtype=torch.bool"),
        ({"output_dtype": "float32"}, "output_dtype='float32'"),
        ({"param_dtype": torch.complex64}, "param_dtype=torch.complex64"),
        ({"param_dtype": torch.float8_e4m3fn}, "float8"),
        ({"cast_forward_inputs": 1}, "cast_forward_inputs=1"),
        (True, "mixed_precision=True"),
        ([torch.bfloat16], "mixed_precision="),
    ],
    ids=str,
)
def test_policies_that_there_are_not(given: Any, text: str) -> None:
    for make in (
        lambda: sw.AutoParallel(Net(), mixed_precision=given),
        lambda: sw.plan(Net(), batches(torch.float32)[0][:2], mixed_precision=given),
    ):
        with pytest.raises(sw.SettingError) as caught:
            make()
        assert text in str(caught.value) and caught.value.legal


def test_parameters_without_a_master() -> None:
    """Parameters stored in 16 bits would lose their updates: refused, but for those that are not trained."""
    batch = batches(torch.float32)[0]
    with pytest.raises(sw.SettingError, match="'table.weight' and .* more is stored as torch.bfloat16") as caught:
        parallel(Net(torch.bfloat16), loss_of, mixed_precision=torch.bfloat16)(*batch)
    assert "net.float()" in caught.value.legal
    frozen = Net(torch.bfloat16)
    for p in frozen.parameters():
        p.requires_grad_(False)
    frozen.norm.float().requires_grad_(True)
    model = parallel(frozen, loss_of, devices=4, mode="data_parallel", mixed_precision=BF16)
    model(*batch).backward()
    assert [n for n, p in frozen.named_parameters() if p.grad is not None] == ["norm.weight", "norm.bias"]
