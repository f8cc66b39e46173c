"""``AutoParallel(train_step)``: the losses and parameters of one device, in every form, mode and runtime."""

from __future__ import annotations

import contextlib
import copy
import shutil
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from ranks import all_passed, run_ranks, run_scenarios
from step_forms import (
    FUNCTIONAL,
    OUTSIDE,
    D,
    Form,
    batches,
    close,
    functional,
    functional_accumulated,
    functional_scaled,
    gradients_of_inputs,
    mean_of_ranks,
    net,
    on_one_device,
    plain,
)
from torch import Tensor

import shardwright as sw

WORLD = 4
MARKS = ((2, 2), (2, 1))
MARKS_OF_TWO = ((1, 2), (2, 1))
MODES = (
    "stand_alone",
    "data_parallel",
    "semi_auto",
    "sharding_propagation",
    "recursive_programming",
    "dynamic_programming",
)
FORMS = (*FUNCTIONAL, *OUTSIDE)

Setting = Callable[[sw.AutoParallel], Any]


def same_parameters(model: nn.Module, one: nn.Module) -> None:
    for (name, a), b in zip(model.named_parameters(), one.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11), name


def nothing(step: sw.AutoParallel) -> None:
    pass


def piped(step: sw.AutoParallel) -> None:
    step.pipeline(stages=2, micro_batches=2, stage_config={"middle": 0, "last": 1})


def check(form: Form, mode: str, setting: Setting = nothing, seed: int = 0, cuts: Any = MARKS) -> sw.AutoParallel:
    """Train by a step in this process."""
    model = net(cuts, seed)
    expected, one = on_one_device(form, model)
    step = sw.AutoParallel(form(model), parallel_mode=mode)
    setting(step)
    close([float(step(x, y)) for x, y in batches()], expected)
    same_parameters(model, one)
    return step


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_every_form_in_one_process(form: Form) -> None:
    sw.init(devices=WORLD)
    step = check(form, "semi_auto")
    assert list(step.models) == ["net"] and step.models["net"] is step and step.net is not None
    assert step.plan.operator("product").in_strategy == MARKS


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_in_one_process(mode: str) -> None:
    sw.init(devices=WORLD)
    for form in (functional, plain):
        check(form, mode)


@pytest.mark.parametrize("form", [functional, functional_accumulated, gradients_of_inputs], ids=lambda f: f.__name__)
def test_pipelines_in_one_process(form: Form) -> None:
    sw.init(devices=WORLD)
    check(form, "data_parallel", piped, cuts=None)


def test_hybrid_parallel_in_one_process() -> None:
    sw.init(devices=WORLD)
    for form in (functional, plain):
        check(form, "hybrid_parallel", cuts=None)


@pytest.mark.parametrize("seed", range(4))
def test_random_choices(seed: int) -> None:
    """A form, a mode, cuts and settings drawn at random."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(among: tuple[Any, ...]) -> Any:
        return among[int(torch.randint(len(among), (), generator=generator))]

    sw.init(devices=drawn((2, 4, 8)))
    form, mode = drawn(FORMS), drawn(MODES[1:])
    strategy, level = drawn(("full_batch", "data_parallel")), drawn((None, "level1", "level3"))

    def setting(step: sw.AutoParallel) -> None:
        step.dataset_strategy(strategy)
        if level is not None:
            step.hsdp(threshold=0, optimizer_level=level)

    marks = (((2, 1), (1, 1)), ((1, 2), (2, 1)), ((1, 1), (1, 2)))
    check(form, mode, setting, seed, drawn(marks if mode == "sharding_propagation" else (None, *marks)))


# -- processes


def on_ranks(
    form: Form, mode: str, strategy: str, setting: Setting = nothing, cuts: Any = MARKS, positions: int | None = None
) -> Callable[[int, int], None]:
    """A scenario: the step on each rank, beside one device."""

    def scenario(rank: int, world: int) -> None:
        sw.init()
        model = net(cuts)
        expected, one = on_one_device(form, model)
        step = sw.AutoParallel(form(model), parallel_mode=mode)
        step.dataset_strategy(strategy)
        setting(step)
        part = [(x, y) for x, y in batches()]
        if strategy == "data_parallel":
            parts = positions or world
            part = [tuple(t.chunk(parts)[rank % parts] for t in batch) for batch in part]
        got = [float(step(x, y)) for x, y in part]
        own = strategy == "data_parallel" and (form in OUTSIDE or mode == "hybrid_parallel")
        close(mean_of_ranks(got) if own else got, expected)
        with step.whole() as plain_net:
            assert plain_net is model
            same_parameters(model, one)

    return scenario


def on_four() -> dict[str, Callable[[int, int], None]]:
    out = {}
    for form in FORMS:
        out[f"{form.__name__}, whole batch"] = on_ranks(form, "semi_auto", "full_batch")
    for form in (functional, functional_scaled, plain):
        out[f"{form.__name__}, parts"] = on_ranks(form, "semi_auto", "data_parallel")
        out[f"{form.__name__}, level 3"] = on_ranks(
            form, "semi_auto", "data_parallel", lambda step: step.hsdp(threshold=0, optimizer_level="level3")
        )
    for form in (functional, functional_scaled):
        out[f"{form.__name__}, pipeline, parts"] = on_ranks(form, "data_parallel", "data_parallel", piped, None, 2)
    out["a run goes on"] = a_run_goes_on
    return out


def on_two() -> dict[str, Callable[[int, int], None]]:
    """Those that look the same on two ranks as on four."""
    out = {}
    for form in (functional, functional_scaled, plain):
        for mode in ("data_parallel", "recursive_programming") if form is not functional_scaled else ():
            out[f"{form.__name__}, {mode}"] = on_ranks(form, mode, "data_parallel", cuts=MARKS_OF_TWO)
        out[f"{form.__name__}, hybrid"] = on_ranks(form, "hybrid_parallel", "data_parallel", cuts=None)
    out["functional, pipeline"] = on_ranks(functional, "data_parallel", "full_batch", piped, None)
    out["gan"] = gan_on_ranks(gan_by_hand)
    out["gan, functional"] = gan_on_ranks(gan_functional)
    out["gan, critic alone"] = gan_on_ranks(gan_critic_alone)
    out["no_sync"] = accumulated_on_ranks
    out["a first call by torch.func"] = first_call_by_torch_func
    out["a model that is not found"] = a_model_that_is_not_found
    return out


# -- several models


def gan(late: bool = False) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    with sw.no_init_parameters() if late else contextlib.nullcontext():
        return _gan()


def _gan() -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(nn.Linear(12, 16, dtype=D), nn.Tanh(), nn.Linear(16, 8, dtype=D))
    critic = nn.Sequential(nn.Linear(8, 16, dtype=D), nn.LeakyReLU(), nn.Linear(16, 1, dtype=D))
    return generator, critic


Gan = Callable[[nn.Module, nn.Module], Callable[[Tensor, Tensor], Tensor]]


def gan_by_hand(generator: nn.Module, critic: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-2)

    def step(z: Tensor, x: Tensor) -> Tensor:
        fake = generator(z)
        of_critic.zero_grad()
        loss = F.softplus(-critic(x)).mean() + F.softplus(critic(fake.detach())).mean()
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        fooled = F.softplus(-critic(fake)).mean()
        fooled.backward()
        of_generator.step()
        return (loss + fooled).detach()

    return step


def gan_functional(generator: nn.Module, critic: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    of_generator = sw.optimizer(torch.optim.Adam(generator.parameters(), lr=1e-2))
    of_critic = sw.optimizer(torch.optim.Adam(critic.parameters(), lr=1e-2))

    def critic_loss(z: Tensor, x: Tensor) -> Tensor:
        return F.softplus(-critic(x)).mean() + F.softplus(critic(generator(z).detach())).mean()

    def generator_loss(z: Tensor) -> Tensor:
        return F.softplus(-critic(generator(z))).mean()

    critic_grads = sw.value_and_grad(critic_loss, None, of_critic.parameters)
    generator_grads = sw.value_and_grad(generator_loss, None, of_generator.parameters)

    def step(z: Tensor, x: Tensor) -> Tensor:
        loss, grads = critic_grads(z, x)
        of_critic(grads)
        fooled, grads = generator_grads(z)
        of_generator(grads)
        assert all(p.grad is None for model in (generator, critic) for p in model.parameters())
        return loss + fooled

    return step


def gan_critic_alone(generator: nn.Module, critic: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The critic is planned by itself, and together with the generator."""
    of_generator = sw.optimizer(torch.optim.Adam(generator.parameters(), lr=1e-2))
    of_critic = sw.optimizer(torch.optim.Adam(critic.parameters(), lr=1e-2))
    critic_grads = sw.value_and_grad(
        lambda fake, x: F.softplus(-critic(x)).mean() + F.softplus(critic(fake)).mean(), None, of_critic.parameters
    )
    generator_grads = sw.value_and_grad(
        lambda z: F.softplus(-critic(generator(z))).mean(), None, of_generator.parameters
    )

    def step(z: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            fake = generator(z)
        loss, grads = critic_grads(fake, x)
        of_critic(grads)
        fooled, grads = generator_grads(z)
        of_generator(grads)
        return loss + fooled

    return step


def gan_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(16, n, dtype=D, generator=generator) for n in (12, 8)) for _ in range(3)]


GANS = {
    gan_by_hand: {"generator", "critic"},
    gan_functional: {"critic+generator"},
    gan_critic_alone: {"generator", "critic", "generator+critic"},
}


def trained_gan(form: Gan, setting: Setting | None, part: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    generator, critic = gan(late=setting is not None)
    step = form(generator, critic)
    if setting is not None:
        step = sw.AutoParallel(step)
        setting(step)
    return [float(step(part(z), part(x))) for z, x in gan_batches()], (generator, critic), step


@pytest.mark.parametrize("form", GANS, ids=lambda f: f.__name__)
def test_two_models_in_one_process(form: Gan) -> None:
    sw.init(devices=WORLD)
    expected, ones, _ = trained_gan(form, None)
    got, models, step = trained_gan(form, lambda step: step.hsdp(threshold=0, optimizer_level="level2"))
    close(got, expected)
    for model, one in zip(models, ones):
        same_parameters(model, one)
    assert set(step.models) == GANS[form]
    assert all("hsdp" in str(part.settings.keywords()) and part.settings.hsdp for part in step.models.values())


def gan_on_ranks(form: Gan) -> Callable[[int, int], None]:
    def scenario(rank: int, world: int) -> None:
        sw.init()
        expected, _, _ = trained_gan(form, None)
        for level in (None, "level3") if form is gan_by_hand else ("level3",):
            got, _, _ = trained_gan(
                form,
                lambda step: None if level is None else step.hsdp(threshold=0, optimizer_level=level),
                lambda x: x.chunk(world)[rank],
            )
            close(mean_of_ranks(got) if form is gan_by_hand else got, expected)

    return scenario


def accumulated_on_ranks(rank: int, world: int) -> None:
    """`no_sync` of a step: the first backward of two sends nothing, the second one sums both. Gradients that are handed
    out cannot wait."""
    sw.init()
    model = net()
    optimizer, x, y = torch.optim.SGD(model.parameters(), lr=0.1), *next(iter(batches()))

    def backward(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()

    step = sw.AutoParallel(backward).dataset_strategy("full_batch")
    with step.no_sync():
        step(x, y)
        with pytest.raises(sw.SettingError, match="no_sync"):
            optimizer.step()
    step(x, y)
    single = net()
    (2 * F.cross_entropy(single(x), y)).backward()
    for a, b in zip(model.parameters(), single.parameters()):
        assert torch.allclose(a.grad.full_tensor(), b.grad, rtol=0, atol=1e-12)
    handing = sw.AutoParallel(functional(net())).dataset_strategy("full_batch")
    with handing.no_sync(), pytest.raises(sw.SettingError, match=r"value_and_grad of forward_fn .* under no_sync"):
        handing(x, y)


def a_run_goes_on(rank: int, world: int) -> None:
    """A checkpoint of a step, loaded before the first call of another one whose parameters have no values yet."""
    sw.init()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)

    def made(late: bool) -> tuple[sw.AutoParallel, Any]:
        with sw.no_init_parameters() if late else contextlib.nullcontext():
            model = net(MARKS)
        optimizer = sw.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
        grad_fn = sw.value_and_grad(lambda x, y: F.cross_entropy(model(x), y), None, optimizer.parameters)

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss, grads = grad_fn(x, y)
            optimizer(grads)
            return loss

        parallel = sw.AutoParallel(step).dataset_strategy("full_batch")
        return parallel.hsdp(threshold=0, optimizer_level="level2"), optimizer

    data = list(batches(4))
    step, optimizer = made(late=False)
    for batch in data[:2]:
        step(*batch)
    sw.save_checkpoint(step, optimizer, folder[0], step=2)
    expected = [float(step(*batch)) for batch in data[2:]]
    step, optimizer = made(late=True)
    sw.load_checkpoint(step, optimizer, folder[0])
    close([float(step(*batch)) for batch in data[2:]], expected)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def a_model_that_is_not_found(rank: int, world: int) -> None:
    """Each rank would train it by itself."""
    sw.init()
    model, head, x = net(), nn.Linear(4, 2, dtype=D), next(iter(batches()))[0]
    hidden = weakref.ref(head)  # of which no code says what it refers to

    def step(x: Tensor) -> Tensor:
        return hidden()(model(x))

    parallel = sw.AutoParallel(step).dataset_strategy("full_batch")
    head.requires_grad_(False)
    assert torch.allclose(parallel(x), parallel(x))  # not trained: alike on all ranks
    head.requires_grad_(True)
    with pytest.raises(sw.SettingError, match=r"test_train_step\.py:\d+: Linear is called in a step(.|\n)*net="):
        parallel(x)
    found = sw.AutoParallel(step, net={"model": model, "head": head}).dataset_strategy("full_batch")
    assert found(x).shape == (16, 2) and set(found.models) == {"model", "head"}


def first_call_by_torch_func(rank: int, world: int) -> None:
    sw.init()
    model = net()
    grad_fn = torch.func.grad_and_value(
        lambda parameters, x: torch.func.functional_call(model, parameters, (x,)).square().mean()
    )
    step = sw.AutoParallel(lambda x: grad_fn(dict(model.named_parameters()), x)).dataset_strategy("full_batch")
    with pytest.raises(sw.SettingError, match=r"first call of the model is under torch\.func(.|\n)*value_and_grad"):
        step(next(iter(batches()))[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
@pytest.mark.parametrize(("world", "scenarios"), [(4, on_four), (2, on_two)], ids=["4", "2"])
def test_steps_on_ranks(world: int, scenarios: Callable[[], dict[str, Callable[[int, int], None]]]) -> None:
    all_passed(run_ranks(run_scenarios, world, scenarios()))


# -- a step beside other things


def test_a_step_is_its_model_to_checkpoints_and_copies(tmp_path: Any) -> None:
    sw.init(devices=WORLD)
    model = net()
    step = sw.AutoParallel(functional(model))
    assert dict(step.named_parameters()).keys() == dict(model.named_parameters()).keys()
    x, y = next(iter(batches()))
    step(x, y)
    sw.save_checkpoint(step, None, tmp_path, step=1)
    after = [p.detach().clone() for p in model.parameters()]
    step(x, y)
    sw.load_checkpoint(step, None, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(after, model.parameters()))
    counterpart = copy.deepcopy(step)
    assert torch.allclose(counterpart(x), model(x), rtol=0, atol=1e-12)  # a copy of the model, which no step calls
    assert step.eval().training is model.training is False


def test_a_step_is_planned_without_being_run(tmp_path: Any) -> None:
    """The step runs up to the first call of its model; nothing of the model, and nothing behind the call, happens."""
    sw.init(devices=WORLD)
    for form in (functional, plain):
        model = net(MARKS)
        before = [p.detach().clone() for p in model.parameters()]
        step = sw.AutoParallel(form(model)).save_operator_strategy_file(tmp_path / "plan.json")
        layouts = step.infer_layout(*next(iter(batches())))
        assert layouts["w"].local_shape(1) == (6, 16) and all(map(torch.equal, before, model.parameters()))
        assert [v.name for v in sw.Plan.load(tmp_path / "plan.json").graph.inputs] == ["x", "y"][
            : 1 + (form is functional)
        ]
        (tmp_path / "plan.json").unlink()
    silent = sw.AutoParallel(lambda x, calls: model(x) if calls else x)
    x = next(iter(batches()))[0]
    silent(x, True)
    with pytest.raises(sw.SettingError, match="has called none of its models"):
        silent.infer_layout(x, False)
    assert torch.equal(silent(x, False), x)


def test_a_model_is_called_by_itself_beside_its_function() -> None:
    """One model, two programs with the same parameters: the function's, and the model's for evaluation."""
    sw.init(devices=WORLD)
    model = net(MARKS)
    grad_fn = sw.value_and_grad(lambda x, y: F.cross_entropy(model(x), y), None, model)

    def step(x: Tensor, y: Tensor, trains: bool) -> Any:
        return grad_fn(x, y)[0] if trains else model(x)

    parallel = sw.AutoParallel(step)
    x, y = next(iter(batches()))
    loss, rows = parallel(x, y, True), parallel(x, y, False)
    assert torch.allclose(loss, F.cross_entropy(model(x), y), rtol=0, atol=1e-12)
    assert torch.allclose(rows, model(x), rtol=0, atol=1e-12)
    assert next(op.name for op in parallel.plan.operators) == "product"


def test_a_model_is_itself_again_after_the_step_and_after_an_error() -> None:
    sw.init(devices=WORLD)
    model = net()
    seen: list[bool] = []

    def step(x: Tensor, fails: bool) -> Tensor:
        out = model(x)
        seen.append(type(out.grad_fn).__name__ != "AddmmBackward0")
        if fails:
            raise ValueError("the user's own")
        return out

    parallel = sw.AutoParallel(step)
    x = next(iter(batches()))[0]
    parallel(x, False)
    with pytest.raises(ValueError, match="the user's own"):
        parallel(x, True)
    assert seen == [True, True] and type(model(x).grad_fn).__name__ == "AddmmBackward0"


def test_what_the_functions_close_over_is_guarded() -> None:
    """A number that the captured function reads is read at each call; so is one that the step itself reads."""
    sw.init(devices=WORLD)
    model, scales = net(), {"inner": 2.0, "outer": 3.0}
    grad_fn = sw.value_and_grad(lambda x: scales["inner"] * model(x).square().mean(), None, model)

    def step(x: Tensor) -> Tensor:
        return scales["outer"] * grad_fn(x)[0]

    parallel = sw.AutoParallel(step)
    x = next(iter(batches()))[0]
    close([float(parallel(x))], [6 * model(x).detach().square().mean()])
    scales.update(inner=5.0, outer=7.0)
    with pytest.warns(sw.RecaptureWarning, match=r"inner.*2\.0.*5\.0") as warned:
        close([float(parallel(x))], [35 * model(x).detach().square().mean()])
    assert warned[0].filename == __file__


def test_a_function_that_is_defined_in_each_step_is_planned_anew_and_says_so() -> None:
    sw.init(devices=WORLD)
    model = net()

    def step(x: Tensor, scale: float) -> Tensor:
        grad_fn = sw.value_and_grad(lambda x: scale * model(x).square().mean(), None, model)
        return grad_fn(x)[0]

    parallel = sw.AutoParallel(step)
    x = next(iter(batches()))[0]
    for scale in (1.0, 2.0):
        close([float(parallel(x, scale))], [scale * model(x).detach().square().mean()])
    with pytest.warns(UserWarning, match=r"another function object at each call of step .*outside of the step"):
        close([float(parallel(x, 3.0))], [3 * model(x).detach().square().mean()])


def test_a_loss_fn_beside_one_model() -> None:
    """The step calls the model with its target, and a pipeline has its loss."""
    sw.init(devices=WORLD)
    model = net()
    expected, one = on_one_device(plain, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    parallel = sw.AutoParallel(step, loss_fn=nn.CrossEntropyLoss(), parallel_mode="data_parallel")
    piped(parallel)
    close([float(parallel(x, y)) for x, y in batches()], expected)
    same_parameters(model, one)


def test_a_pipeline_without_the_loss_says_where_the_loss_may_be() -> None:
    sw.init(devices=WORLD)
    parallel = sw.AutoParallel(plain(net()), parallel_mode="data_parallel")
    piped(parallel)
    with pytest.raises(sw.SettingError, match=r"it returns no loss(.|\n)*sw\.value_and_grad"):
        parallel(*next(iter(batches())))
