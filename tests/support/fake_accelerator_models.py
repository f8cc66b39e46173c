"""Models, modes and pipelines on the fake accelerator: a script as `fake_accelerator`, whose lines it prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import fake_accelerator as fake  # the device is registered first
import layout_functional
import layout_objects
import llama
import operator_functional
import operator_objects
import torch
import torchvision
from gpt import mark
from resnet50 import ResNet, split
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from shardwright import process_runtime as process
from shardwright.pipeline.schedules import SCHEDULES, schedule
from shardwright.rules.random_numbers import counter_rng
from shardwright.runtime import pipeline_p2p
from shardwright.runtime.compilation import Compilation

schedule("zbv", 2, 4)  # imports of torch that make tensors
pipeline_p2p._make_even = lambda runtime: None  # reads the number of groups of all ranks

DIGITS = (torch.zeros(32, 1, 28, 28), torch.zeros(32, dtype=torch.long))
PLAIN_DIGITS = (torch.zeros(32, 784), DIGITS[1])
PICTURES = (torch.zeros(16, 3, 32, 32), torch.zeros(16, dtype=torch.long))
MANY_ROWS = (torch.zeros(128, 16), torch.zeros(128, 16))
BUILT, INPUTS, DATASETS = ("late", "cpu", "moved"), ("cpu", "device"), ("full_batch", "data_parallel", "tuples")
#: Where a model is built, where the inputs are, and the dataset: every two of the choices are together in one of these.
COVERING = [
    (built, INPUTS[(i + j) % 2], dataset) for i, built in enumerate(BUILT) for j, dataset in enumerate(DATASETS)
]
SEARCHES = ("sharding_propagation", "recursive_programming", "dynamic_programming")


def of_the_readme() -> nn.Module:
    """The README's own model and mark."""
    net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    sw.shard(net[0], in_strategy=((2, 4), (1, 4)))
    return net


class Layers(nn.Module):
    """Layers, of which the first and the last have one weight, with dropout between them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.dropout = nn.Dropout(0.1)
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(self.dropout(x)))
        return x


class Attention(nn.Module):
    """Attention with dropout among the columns of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(-1, 2, 4, 2) for part in self.project(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1).reshape(x.shape)


def piped(scheduler: str, stages: int) -> Callable[[nn.Module, nn.Module, sw.AutoParallel], Any]:
    """The setting of a pipeline of `Layers`."""
    count = stages * SCHEDULES[scheduler]
    return lambda net, loss, model: model.pipeline(stages, scheduler, 4, {f"layers.{i}": i for i in range(count)})


def as_default(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `run` while the device is torch's default."""
    torch.set_default_device(fake.DEVICE)
    try:
        return run()
    finally:
        torch.set_default_device(None)


def in_one_process(run: Callable[[], dict[str, Any]], chosen: bool = False) -> dict[str, Any]:
    """The result of `run` in the local runtime, with a device that the user has chosen or with that of the model."""
    before = process.current()
    device = fake.DEVICE if chosen else torch.device("cpu")
    process._current[:] = [process.Runtime(False, fake.WORLD, 0, device, chosen=chosen)]
    try:
        return run()
    finally:
        process._current[:] = [before]


def moved_later() -> dict[str, Any]:
    """A model that is moved to the device after a call on the CPU: it is planned anew."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    with mode:
        net = fake.MadeInside()
        model = sw.AutoParallel(net, nn.MSELoss(), parallel_mode="data_parallel").dataset_strategy("full_batch")
        rows = torch.empty(16, 16)
        model(rows, rows).backward()
        net.to(fake.DEVICE)
        text = raised(lambda: model(rows, rows))
        assert "input 0 is on cpu, the model on npu:0" in text, text
        rows = torch.empty(16, 16, device=fake.DEVICE)
        loss = model(rows, rows)
        loss.backward()
        text = raised(lambda: model(rows.cpu(), rows))
        assert "input 0 is on cpu, the model on npu:0" in text, text
    return {"loss": str(loss.device), "parameters": sorted({str(p.grad.device) for p in net.parameters()})}


def moved_away() -> dict[str, Any]:
    """A model that is moved from the device of its process after the first call: an error."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        net = fake.MadeInside()
        fake.forget_values(net, mode)
        model = sw.AutoParallel(net, nn.MSELoss(), parallel_mode="data_parallel").dataset_strategy("full_batch")
        rows = torch.empty(16, 16)
        loss = model(rows, rows)
        before = net.inner._parameters["weight"]
        net.inner._parameters["weight"] = nn.Parameter(torch.empty(32, 16))
        text = raised(lambda: model(rows, rows))
        assert "weight is on cpu, and this process computes on npu:0" in text, text
    return {"loss": str(loss.device), "parameters": [str(before.to_local().device)]}


def raised(call: Callable[[], Any]) -> str:
    """The text of the error of the family that a call raises."""
    try:
        call()
    except sw.SettingError as error:
        return str(error)
    return "no error"


def as_compiled(make: Callable[[], nn.Module], **given: Any) -> dict[str, Any]:
    """A model whose program is compiled, by a compiler that runs it as it is. No tensor or number of it that differs
    from call to call is in host memory."""
    programs: list[torch.fx.GraphModule] = []

    def compiled(self: Compilation, program: torch.fx.GraphModule, more: Any = None) -> Callable[..., Any]:
        programs.append(program)

        def run(*tensors: Tensor) -> Any:
            (on,) = {x.device.type for x in tensors if x.shape == (4,) and x.dtype == torch.int64}
            assert on == "npu", f"the seed is on {on}"
            return program(*tensors)

        return run

    seed = lambda exact: torch.empty(4, dtype=torch.int64, device="cpu")  # a fake one: its copy is one, too
    with mock.patch.object(Compilation, "compiled", compiled), mock.patch.object(process.stream, "draw", seed):
        result = fake.outcome(make, MANY_ROWS, nn.MSELoss, parallel_mode="data_parallel", compile=True, **given)
    assert programs
    made = {str(node.kwargs["device"]) for p in programs for node in p.graph.nodes if node.kwargs.get("device")}
    assert made <= {"npu:0"} and (made or {"prepared", "random"} & {*given}), made
    return result


class Noise(nn.Module):
    """Dropout, normal numbers, slopes that are drawn, a permutation, and classes that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout, self.slopes = nn.Linear(16, 16), nn.Dropout(0.1), nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        order, chosen = torch.randperm(16, device=x.device), torch.multinomial(x.detach().softmax(-1), 16, True)
        return self.slopes(self.inner(self.dropout(x)) + torch.randn_like(x))[:, order].gather(1, chosen)


class WithoutDoubles(TorchDispatchMode):
    """A device that has no float64, as mps and Ascend have none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves((args, kwargs, made)):
            if isinstance(x, Tensor) and x.device.type == "npu" and x.dtype in self.lacks:
                raise TypeError(f"{func}: the device has no {x.dtype}")
        return made

    lacks: tuple[torch.dtype, ...] = (torch.float64,)


def drawn_numbers(words: bool) -> dict[str, Any]:
    """All numbers of `counter_rng` on a device without float64.

    Args:
        words: True where the device computes with integers of 64 bits; else masks and floats are drawn without them.
    """
    seed, where, lacking = torch.tensor([5, 1, 1, 0]), ([], None, [], [64, 7], [64, 7], 3), WithoutDoubles()
    lacking.lacks = (torch.float64,) if words else (torch.float64, torch.int64)
    with (
        mock.patch.object(counter_rng, "has_words", lambda kind: words),
        FakeTensorMode(allow_non_fake_inputs=True),
        lacking,
    ):
        made = [counter_rng._mask(seed, *where, 0.3, torch.bool, fake.DEVICE)]
        for kind in ("uniform", "normal", "exponential"):
            for dtype in (torch.float32, torch.bfloat16):
                made.append(counter_rng._draw(seed, *where, kind, dtype, fake.DEVICE))
        if words:
            made.append(counter_rng._draw(seed, *where, "integer", torch.int64, fake.DEVICE))
            for replacement in (True, False):
                weights = torch.empty(8, 4, device=fake.DEVICE)
                made.append(counter_rng._choose(seed, [], weights, [], [8], 3, 2, replacement))
    assert not counter_rng.has_doubles("npu")
    return {"loss": str(made[0].device), "parameters": sorted({str(x.device) for x in made})}


def recomputed(net: nn.Module, loss: nn.Module, model: sw.AutoParallel) -> None:
    """Marks, with every block recomputed."""
    mark(net, loss, 2, 4)
    for block in net.blocks:
        sw.recompute(block)


def covered(model: int) -> list[tuple[str, str, str]]:
    """Three combinations with every choice; those of six models are all eighteen.

    Args:
        model: the number of the model.
    """
    return [(built, INPUTS[(i + model // 3) % 2], DATASETS[(i + model) % 3]) for i, built in enumerate(BUILT)]


def by_itself() -> Iterator[tuple[str, Callable[..., dict[str, Any]], tuple[int, int], list[tuple[str, str, str]]]]:
    """Name, run, numbers of dims of input and target, and combinations."""
    # Not fused=True, as in the README: fused SGD has no form for tensors without values, as fused AdamW has.
    plain = {"optimizer": {"optimizer": torch.optim.SGD}}
    for i, module in enumerate((operator_objects, operator_functional, layout_objects, layout_functional)):
        run = partial(fake.outcome, module.Network, DIGITS, nn.CrossEntropyLoss, parallel_mode="semi_auto", **plain)
        yield module.__name__, run, (4, 1), covered(i)
    readme = partial(fake.outcome, of_the_readme, PLAIN_DIGITS, nn.CrossEntropyLoss)
    yield "README", partial(readme, parallel_mode="sharding_propagation", **plain), (2, 1), COVERING
    small = partial(llama.Llama, vocabulary=64, length=16, layers=1, width=64, heads=8, kv_heads=4, hidden=96)
    marked = lambda net, loss, model: llama.mark(net, loss, 2, 4)
    yield "llama", partial(fake.outcome, small, fake.TOKENS, fake.TokenLoss, prepared=marked), (2, 2), covered(4)
    residual = partial(ResNet, (1, 1, 1, 1), 16)
    run = partial(fake.outcome, residual, PICTURES, nn.CrossEntropyLoss, parallel_mode="semi_auto")
    yield "resnet", partial(run, prepared=lambda net, loss, model: split(net, 8)), (4, 1), covered(5)


def cases() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name -> the call that runs it."""
    for name, run, sizes, combinations in by_itself():
        for built, inputs, dataset in combinations:
            cuts = tuple((fake.WORLD, *(1,) * (dims - 1)) for dims in sizes) if dataset == "tuples" else dataset
            where = {"built": built, "inputs": inputs, "dataset": cuts}
            yield f"{name}, {built}, inputs on {inputs}, {dataset}", partial(run, **where)
    residual = partial(ResNet, (1, 1, 1, 1), 16)
    run = partial(fake.outcome, residual, PICTURES, nn.CrossEntropyLoss, dataset="data_parallel")
    yield "resnet, batch norms of the whole batch", partial(run, parallel_mode="data_parallel", sync_batch_norm=True)
    run = partial(fake.outcome, torchvision.models.resnet50, PICTURES, nn.CrossEntropyLoss, dataset="data_parallel")
    yield "resnet50 of torchvision", partial(run, parallel_mode="data_parallel")
    for built in ("late", "cpu"):
        run = partial(fake.outcome, Attention, fake.ROWS, nn.MSELoss, built=built, random="fast")
        yield f"attention with fast dropout, {built}", partial(run, parallel_mode="data_parallel")
    for mode in SEARCHES:
        run = partial(fake.outcome, fake.MadeInside, fake.ROWS, nn.MSELoss, built="cpu", parallel_mode=mode)
        marked = lambda net, loss, model: sw.shard(net.inner, ((2, 1), (4, 1), (4,)))
        yield mode, partial(run, prepared=marked if mode == "sharding_propagation" else None)
    for scheduler in SCHEDULES:
        for built, stages in (("late", 2), ("cpu", 4)):
            yield (
                f"{scheduler}, {stages} stages, {built}",
                partial(
                    fake.outcome, partial(Layers, stages * SCHEDULES[scheduler]), fake.ROWS, nn.MSELoss, built=built,
                    prepared=piped(scheduler, stages), parallel_mode="data_parallel",
                ),
            )  # fmt: skip
    yield (
        "pipeline, parts of the batch",
        partial(
            fake.outcome, partial(Layers, 2), MANY_ROWS, nn.MSELoss, dataset="data_parallel", inputs="device",
            prepared=piped("1f1b", 2), parallel_mode="data_parallel",
        ),
    )  # fmt: skip
    for late in (True, False):
        run = partial(fake.outcome, partial(fake.gpt, layers=1), fake.TOKENS, fake.TokenLoss)
        run = partial(run, built="late" if late else "cpu")
        yield f"default device, {'late' if late else 'built on it'}", partial(as_default, run)
    run = partial(fake.outcome, partial(Layers, 4), fake.ROWS, nn.MSELoss, prepared=piped("zero_bubble", 4))
    yield "default device, pipeline", partial(as_default, run)
    for chosen, built in ((False, "moved"), (True, "cpu"), (True, "late")):
        where = {"built": built, "inputs": "cpu" if chosen else "device"}
        name = f"one process, {'device chosen' if chosen else 'device of the model'}, {built}"
        run = partial(fake.outcome, partial(Layers, 4), MANY_ROWS, nn.MSELoss, **where, parallel_mode="data_parallel")
        yield name, partial(in_one_process, run, chosen)
        yield f"{name}, pipeline", partial(in_one_process, partial(run, prepared=piped("zero_bubble", 4)), chosen)
    yield "one process, moved after the first call", partial(in_one_process, moved_later)
    yield "moved after the first call", moved_away
    yield "compiled", partial(as_compiled, partial(Layers, 2), dataset="data_parallel", inputs="device")
    yield "compiled, with other random numbers", partial(as_compiled, Noise, dataset="data_parallel", inputs="device")
    fast = {"dataset": "data_parallel", "inputs": "device", "random": "fast"}
    yield "compiled, attention with fast dropout", partial(as_compiled, Attention, **fast)
    piped_and_compiled = {"dataset": "data_parallel", "inputs": "device", "prepared": piped("1f1b", 2)}
    yield "compiled, pipeline", partial(as_compiled, partial(Layers, 2), **piped_and_compiled)
    yield "numbers without float64", partial(drawn_numbers, True)
    yield "numbers without float64 and words", partial(drawn_numbers, False)
    yield "blocks recomputed", partial(fake.outcome, fake.gpt, fake.TOKENS, fake.TokenLoss, prepared=recomputed)


if __name__ == "__main__":
    fake.main(cases())
