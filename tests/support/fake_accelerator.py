"""Training steps as one rank of eight on an accelerator that is not there: a script, in a process of its own.

PrivateUse1 is registered as the device "npu", tensors are fake (shapes, dtypes and devices without values), and the
process group is torch's "fake" one, whose collectives do nothing. Each mix of devices raises, in the capture, in the
program and in the optimizer. Python that reads values (seeds, meshes, the exact random words) runs on the host.

The script prints a line of JSON for each case: its name, and the error, or where loss and parameters are.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torchvision_operators  # noqa: F401  before torchvision is imported
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

sys.path[:0] = [str(Path(__file__).parents[2] / "examples")]
RANK, WORLD = 3, 8


class Accelerator:
    """The answers of a backend with eight devices."""

    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    is_available = is_initialized = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: WORLD)
    set_device = staticmethod(lambda index: None)
    _is_in_bad_fork = staticmethod(lambda: False)


_setup_privateuseone_for_python_backend("npu", backend_module=Accelerator())
DEVICE = torch.device("npu", 0)  # autograd has a queue for the first one alone

from gpt import GPT, mark

import shardwright as sw
from shardwright import process_runtime as process
from shardwright.parallel import call_planning
from shardwright.rules.random_numbers import counter_rng
from shardwright.runtime import deferred_init, step_program
from shardwright.runtime.distributed import agreement, parameters

PUT = deferred_init.put_in_place
#: Kept, because a library goes with its object.
LIBRARIES: list[torch.library.Library] = []


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on real tensors, inside the block of fake ones."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def put_in_place(old: Tensor, new: Tensor) -> None:
    """The package's function; a fake tensor notes its device in an attribute, which would be overwritten."""
    where = new.device
    PUT(old, new)
    if isinstance(old, FakeTensor):
        old.fake_device = where


def narrow_linear(*tensors: Tensor) -> Tensor:
    """The product under autocast for the device, which no other operator is on the list of."""
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(autocast):
        return nn.functional.linear(*(x.to(torch.get_autocast_dtype("npu")) for x in tensors))


def prepare() -> None:
    """Join the fake group, and let that run on the host which reads values."""
    dist.Backend.backend_capability["fake"].append("npu")
    dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    agreement._exchanged = lambda mine: [mine] * WORLD
    agreement.from_first = lambda mine: mine
    agreement.Agreement.search = lambda self, graph, settings, find, take: find()  # on rank 0 for all
    call_planning.beginnings = lambda module: {}
    call_planning.digest_of_parts = lambda inputs: ""
    parameters.to_dtensor = on_host(parameters.to_dtensor)
    process.stream.upcoming = on_host(process.stream.upcoming)
    process.stream.draw = on_host(process.stream.draw)
    process._use_default_generator = on_host(process._use_default_generator)
    deferred_init.put_in_place = step_program.put_in_place = put_in_place
    casts = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    casts.fallback(torch.library.fallthrough_kernel)
    products = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    products.impl("linear", narrow_linear)
    LIBRARIES.extend((casts, products))
    counter_rng.PLAIN[torch.ops.shardwright.mask.default] = counter_rng._empty
    process._current[:] = [process.Runtime(True, WORLD, RANK, DEVICE, 300.0, False)]


class TokenLoss(nn.Module):
    """Cross entropy of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = sw.Operator(nn.functional.cross_entropy)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.cross_entropy(logits.flatten(0, 1), target.flatten())


class Images(nn.Module):
    """Convolutions, a norm and a pooling. (The counter of a batch norm has a value, and would be moved for real.)"""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8)
        self.second, self.out = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        return self.out(torch.relu(self.second(x)).mean((2, 3)))


class MadeInside(nn.Module):
    """A model that makes tensors in its forward, and has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("scale", torch.full((32,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(32, device=x.device, dtype=x.dtype)
        return self.out(torch.relu(self.inner(x)) * self.scale + positions / 32)


gpt = partial(GPT, vocabulary=64, length=16, layers=2, width=64, heads=8)
TOKENS = (torch.zeros(16, 16, dtype=torch.long),) * 2
PICTURES = (torch.zeros(16, 3, 16, 16), torch.zeros(16, dtype=torch.long))
ROWS = (torch.zeros(16, 16), torch.zeros(16, 16))


def optimizer_of(model: nn.Module, optimizer: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    return optimizer(model.parameters(), 1e-3, **options)


def forget_values(net: nn.Module, mode: FakeTensorMode) -> None:
    """Forget the values of buffers: a fake tensor that knows its value would be made on the device for real."""
    with mode:
        for module in net.modules():
            for name, held in module._buffers.items():
                if held is not None and not held.is_meta:
                    module._buffers[name] = torch.empty(held.shape, dtype=held.dtype, device=held.device)


def moved(net: nn.Module, mode: FakeTensorMode) -> None:
    """Put a model on the device, as a move leaves it: a fake tensor itself keeps the device on which it was made."""
    of: dict[Tensor, nn.Parameter] = {}
    with mode:
        for module in net.modules():
            for name, held in module._parameters.items():
                if held is not None:
                    module._parameters[name] = of.setdefault(held, nn.Parameter(torch.empty_like(held, device=DEVICE)))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=DEVICE)


def outcome(
    make: Callable[[], nn.Module],
    data: tuple[Tensor, ...],
    loss: Callable[[], nn.Module],
    *,
    built: str = "late",
    inputs: str = "cpu",
    dataset: Any = "full_batch",
    prepared: Callable[[nn.Module, nn.Module, sw.AutoParallel], Any] | None = None,
    autocast: bool = False,
    optimizer: dict[str, Any] | None = None,
    second: contextlib.AbstractContextManager[Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Two steps.

    Args:
        second: the context of the second one.
        optimizer: the options of AdamW, or of the class named `optimizer` among them.
        built: "late" (`no_init_parameters`), "cpu", or "moved" (on the device before the first call).
        inputs: "cpu", or "device".
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as building:
        building.enter_context(sw.no_init_parameters() if built == "late" else mode)
        net = make()
    forget_values(net, mode)
    if built == "moved":
        moved(net, mode)
    criterion = loss()
    model = sw.AutoParallel(net, criterion, **settings)
    if prepared is not None:
        prepared(net, criterion, model)
    model.dataset_strategy(dataset)
    parts = data if dataset == "full_batch" else tuple(x[: len(x) // WORLD] for x in data)
    where = DEVICE if inputs == "device" else torch.device("cpu")
    with mode:
        feeding = [torch.empty(x.shape, dtype=x.dtype, device=where) for x in parts]
        made = None
        for context in (None, second):
            with context or contextlib.nullcontext():
                with torch.autocast("npu", torch.bfloat16) if autocast else contextlib.nullcontext():
                    value = model(*feeding)
                value.backward()
                made = made or optimizer_of(model, **(optimizer or {"fused": True}))
                made.step()
                made.zero_grad()
    if autocast:
        narrow = {op.kind for op in model.plan.graph.ops for out in op.outputs if out and out.dtype == torch.bfloat16}
        assert "linear" in narrow and "layer_norm" not in narrow, narrow
    held = {str(p.to_local().device) if hasattr(p, "to_local") else str(p.device) for p in model.parameters()}
    return {"loss": str(value.device), "parameters": sorted(held)}


class FromHost(TorchDispatchMode):
    """The operators that read a tensor of the host and return one on the device: copies. A mask is made as on a device,
    of numbers that are read from the seed, and its operators are seen too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.masks = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.shardwright.mask.default:
            self.masks += 1
            seed = mock.Mock(tolist=lambda: [5, 1, 1, 0], is_meta=False)  # a fake one has no numbers
            starts: Any = [0 for _ in args[1]]
            with self:
                return counter_rng._mask(seed, starts, *args[2:], **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        read, written = (pytree.tree_leaves(x) for x in ((args, kwargs), made))
        kinds = [{x.device.type for x in xs if isinstance(x, Tensor)} for xs in (read, written)]
        if "cpu" in kinds[0] and "npu" in kinds[1]:
            self.seen.append(str(func))
        return made


def without_copies(make: Callable[[], nn.Module], **given: Any) -> dict[str, Any]:
    """A model with exact dropout, in whose second step no tensor comes from the host."""
    copies, mask = FromHost(), torch.ops.shardwright.mask.default
    with mock.patch.dict(counter_rng.PLAIN, {mask: mask}), mock.patch.object(counter_rng, "has_words", bool):
        result = outcome(make, TOKENS, TokenLoss, inputs="device", second=copies, random="exact", **given)
    assert copies.masks and not copies.seen, (copies.masks, copies.seen)
    return result


def cases() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name -> the call that runs it."""
    marked = lambda net, criterion, model: mark(net, criterion, 2, 4)
    rows = ((8, 1), (8, 1))
    datasets: tuple[Any, ...] = ("full_batch", "data_parallel", rows)
    # Every two of the choices are together in one of the combinations of the GPT.
    half = {("late", "cpu"), ("cpu", "device"), ("moved", "cpu")}
    for built, inputs, dataset in product(("late", "cpu", "moved"), ("cpu", "device"), datasets):
        where = {"built": built, "inputs": inputs, "dataset": dataset}
        name = f"{built}, inputs on {inputs}, {'tuples' if dataset is rows else dataset}"
        made = partial(outcome, MadeInside, ROWS, nn.MSELoss, **where)
        yield f"made inside, {name}", partial(made, parallel_mode="semi_auto" if dataset is rows else "data_parallel")
        if dataset is rows or ((built, inputs) in half) != (dataset == "full_batch"):
            continue
        yield (
            f"gpt {name}",
            partial(
                outcome,
                gpt,
                TOKENS,
                TokenLoss,
                **where,
                prepared=marked if dataset == "full_batch" else None,
                parallel_mode="semi_auto" if dataset == "full_batch" else "data_parallel",
            ),
        )
    yield "tuples", partial(outcome, gpt, TOKENS, TokenLoss, dataset=rows, parallel_mode="semi_auto")
    yield "images", partial(outcome, Images, PICTURES, nn.CrossEntropyLoss, parallel_mode="data_parallel")
    for level in ("level1", "level2", "level3"):
        yield (
            f"hsdp {level}",
            partial(
                outcome, gpt, TOKENS, TokenLoss, dataset="data_parallel", parallel_mode="data_parallel",
                prepared=lambda n, c, m, level=level: m.hsdp(threshold=0, optimizer_level=level),
            ),
        )  # fmt: skip
    for how in ("exact", "fast"):
        yield (
            f"dropout {how}",
            partial(outcome, partial(gpt, dropout=0.1), TOKENS, TokenLoss, prepared=marked, random=how),
        )
    dropping = partial(gpt, dropout=0.1)
    yield "dropout exact, without copies", partial(without_copies, dropping, prepared=marked)
    parts = {"dataset": "data_parallel", "parallel_mode": "data_parallel"}
    yield "dropout exact, without copies, data_parallel", partial(without_copies, dropping, **parts)
    yield "recompute", partial(outcome, gpt, TOKENS, TokenLoss, prepared=marked, recompute=lambda op: op.kind == "gelu")
    yield "autocast", partial(outcome, gpt, TOKENS, TokenLoss, built="cpu", prepared=marked, autocast=True)
    yield "foreach", partial(outcome, gpt, TOKENS, TokenLoss, prepared=marked, optimizer={"foreach": True})


def main(found: Iterable[tuple[str, Callable[[], dict[str, Any]]]]) -> None:
    """Run all cases, or those whose names are given."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    prepare()
    for name, run in found:
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        gc.freeze()  # no search for the optimizers of a case walks what was alive before it
        try:
            text = run()
        except Exception as error:
            frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
            text = {
                "error": f"{type(error).__name__}: {error}"[:400],
                "frames": [f for f in frames if "fake_tensor" not in f and "_pytree" not in f][-8:],
            }
        print(json.dumps({"name": name, **text}), flush=True)


if __name__ == "__main__":
    main(cases())
