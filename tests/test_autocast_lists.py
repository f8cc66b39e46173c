"""Every operator of torch's autocast lists: its casts, cut and whole, are those of one device under autocast."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_device import parallel
from rule_reference import assignments
from torch import Tensor, nn
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
from torch.utils import _pytree as pytree

import shardwright as sw
from shardwright.autocast import Autocast, UnderAutocast, entered
from shardwright.capture.export import capture
from shardwright.errors import CaptureError, ShardwrightError
from shardwright.graph import Graph, Op, Value
from shardwright.rules import bound_rule, find_rule

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

pytestmark = pytest.mark.filterwarnings("ignore")


class Called(nn.Module):
    """One call of a function. Tensors among its arguments are the module's inputs, in their order."""

    def __init__(self, function: Callable, args: Any, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.function, self.kwargs = function, kwargs
        leaves, self.spec = pytree.tree_flatten(args)
        self.leaves = [None if isinstance(x, Tensor) else x for x in leaves]
        self.places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.tensors = [x for x in leaves if isinstance(x, Tensor)]

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return self.function(*pytree.tree_unflatten(leaves, self.spec), **self.kwargs)


def functions(name: str) -> Callable:
    for owner in (torch.Tensor,) if name.startswith("__") else (torch, torch._C._nn, F, torch._C._linalg, torch.Tensor):
        if hasattr(owner, name):
            return getattr(owner, name)
    raise AssertionError(name)


def listed(lists: Any, names: list[str]) -> list[tuple[str, str, Called]]:
    """(list, operator, call) of each entry of the lists of these names."""
    out = []
    for name in names:
        for entry in getattr(lists, name):
            if len(entry) == 3 and entry[2] is True:  # not on ROCm
                continue
            args = entry[1] if isinstance(entry[1], tuple) else entry[1:]
            if entry[0] == "einsum":  # torch's own entry names four dims of matrices
                args = ("bk,bq->kq", *entry[2])
            kwargs = entry[2] if len(entry) == 3 and isinstance(entry[2], dict) else {}
            if entry[0].startswith(("cudnn", "__div__")):
                continue  # on GPUs alone; Python 2's
            if entry[0] == "linalg_multi_dot":
                args = (tuple(pytree.tree_leaves(args)),)
            out.append((name, entry[0], Called(functions(entry[0]), args, kwargs)))
    return out


CUDA_LISTS = [
    "torch_expect_builtin_promote",
    "methods_expect_builtin_promote",
    "torch_fp16",
    "torch_fp32",
    "torch_need_autocast_promote",
    "nn_fp16",
    "nn_fp32",
    "linalg_fp16",
    "methods_fp16",
    "methods_fp32",
]
CPU_LISTS = [
    "torch_expect_builtin_promote",
    "methods_expect_builtin_promote",
    "torch_16",
    "torch_fp32",
    "nn_16",
    "nn_fp32",
    "torch_need_autocast_promote",
]


def entries() -> list[Any]:
    """The entries of both lists, those with several examples numbered.

    The same call is one entry, with all lists that have it: both devices' entries run under the autocast of the CPU.
    """
    torch.manual_seed(0)
    out, seen, known = [], {}, {}
    for device, lists, names in (
        ("cpu", AutocastCPUTestLists("cpu"), CPU_LISTS),
        ("cuda", AutocastTestLists("cpu"), CUDA_LISTS),
    ):
        for name, operator, call in listed(lists, names):
            seen[device, operator] = seen.get((device, operator), 0) + 1
            key = same_call(call)
            if key in known:
                known[key].append(name)
                continue
            lists_of = known[key] = [name]
            out.append(pytest.param(lists_of, call, id=f"{device}-{name}-{operator}-{seen[device, operator]}"))
    return out


def same_call(call: Called) -> tuple:
    """The key of calls that differ in the values of their tensors alone, those in half precision in either one."""
    tensors = [
        (tuple(x.shape), x.stride(), "half" if x.dtype in (BF16, FP16) else x.dtype, x.requires_grad)
        for x in call.tensors
    ]
    return call.function, repr(call.leaves), str(call.spec), repr(sorted(call.kwargs.items())), repr(tensors)


def given(call: Called, dtype: torch.dtype) -> list[Tensor]:
    """Fresh inputs, those in half precision in this one."""
    made = []
    for x in call.tensors:
        x = x.detach().to(dtype) if x.dtype in (BF16, FP16) else x.detach().clone()
        made.append(x.requires_grad_(x.is_floating_point()))
    return made


def backward(outputs: Any, inputs: list[Tensor]) -> list[Tensor | None]:
    ends = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
    if not ends:
        return []
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.rand(x.shape, generator=generator).to(x.dtype) for x in ends]
    return list(torch.autograd.grad(ends, [x for x in inputs if x.requires_grad], seeds, allow_unused=True))


def operator(graph: Graph) -> Op | None:
    """The one operator of a graph beside casts and views."""
    ops = [
        op
        for op in graph.ops
        if op.kind not in ("to", "broadcast_tensors") and not (find_rule(op) is not None and find_rule(op).view)
    ]
    return ops[0] if len(ops) == 1 else None


def strategies(graph: Graph, count: int) -> list[tuple]:
    """Strategies of the operator that occupy four devices, as different as there are."""
    op = operator(graph)
    if op is None or find_rule(op) is None:
        return []
    bound = bound_rule(op)
    found = dict.fromkeys(
        bound.in_strategy(a) for a in assignments(bound, 4) if len(a.used) and sum(d.size - 1 for d in a.used) >= 2
    )
    return list(found)[:: max(1, len(found) // count)][:count]


def assert_close(got: Any, expected: Any, coarsest: torch.dtype, what: str) -> None:
    """Equal in dtype, and in value up to the order of sums in this precision."""
    tolerance = {BF16: 2**-7, FP16: 2**-10, FP32: 1e-5}[coarsest]
    if coarsest in (BF16, FP16) and what.startswith("conv_transpose"):
        tolerance *= (
            8  # on CPUs without products in 16 bits torch adds the columns of a transposed convolution in 16 bits
        )
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        if not isinstance(b, Tensor):
            assert a == b, what
            continue
        assert a.dtype == b.dtype, f"{what}: {a.dtype}, on one device {b.dtype}"
        if b.numel() and b.dtype.is_floating_point:
            scale = b.abs().nan_to_num(0, 0, 0).max().item()
            torch.testing.assert_close(
                a, b, rtol=tolerance, atol=2 * tolerance * scale, equal_nan=True, msg=lambda text: f"{what}: {text}"
            )
        else:
            assert torch.equal(a, b), what


def precisions(graph: Graph, inputs: list[Tensor], dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """The coarsest dtypes of an operator's results and of its gradients, under autocast to `dtype`."""
    made = operator(graph)
    floating = [
        v.dtype
        for op in ([made] if made is not None else graph.ops)
        for v in (*op.inputs, *op.outputs)
        if v is not None and v.dtype.is_floating_point
    ] or [FP32]
    floating += [dtype for op in graph.ops if isinstance(op.target, UnderAutocast)]  # which casts inside
    given_in = [x.dtype for x in inputs if x.is_floating_point()]  # a gradient is rounded to its input's dtype
    order = [BF16, FP16, FP32]
    return min(floating, key=order.index), min(floating + given_in, key=order.index)


CUT: set[str] = set()


@pytest.mark.long
@pytest.mark.parametrize(("lists_of", "call"), entries())
def test_listed_operators_on_four_devices(lists_of: list[str], call: Called) -> None:
    """On the CPU under its autocast, for operators of either list: whole, and by two strategies of its own.

    Float16 has the second strategy; an operator of one strategy has it in both precisions.
    """
    rest: list[tuple] = []  # strategies that have not run, and then one that has
    for dtype in (BF16, FP16):
        theirs = given(call, dtype)
        with torch.autocast("cpu", dtype):
            try:
                expected = call(*theirs)
            except RuntimeError as error:  # without a CPU kernel: neither here
                assert any(
                    text in str(error)
                    for text in (
                        "not implemented for",
                        "Could not run",
                        "dtype",
                        "not supported",
                        "scalar type",
                        "CUDA",
                    )
                ), error
                continue
        if isinstance(expected, bool):
            continue  # torch.equal: a number, which no captured program depends on
        try:
            gradients = backward(expected, theirs)
        except RuntimeError as error:  # operators of inference alone
            assert "is not implemented" in str(error)
            gradients = None
        pending: list[tuple | None] = [*rest] or [None]
        for strategy in pending:
            net = Called(call.function, pytree.tree_unflatten(list(call.leaves), call.spec), call.kwargs)
            net.leaves, net.places, net.spec = call.leaves, call.places, call.spec
            if strategy is not None:
                net.function = sw.shard(call.function, strategy)
            ours = given(call, dtype)
            model = parallel(net, devices=4, on_missing_rule="replicate")
            with torch.autocast("cpu", dtype):
                try:
                    got = model(*ours)
                except ShardwrightError as error:
                    assert strategy is not None and "internal" not in str(error), error
                    continue
            coarsest, coarsest_gradient = precisions(model.plan.graph, theirs, dtype)
            if strategy is None:  # the same program as all of them, from whose graph the strategies are
                rest = strategies(model.plan.graph, 2)
                pending += rest
            else:
                CUT.update(f"{name} {call.function.__name__}" for name in lists_of)
            what = f"{call.function.__name__} in {dtype} cut {strategy}"
            assert_close(got, expected, coarsest, what)
            if gradients is not None:
                assert_close(backward(got, ours), gradients, coarsest_gradient, f"gradients of {what}")
            if strategy is not None:
                rest = [other for other in rest if other != strategy] + [strategy]
                break


@pytest.mark.long
def test_most_of_them_were_cut() -> None:
    if not CUT:
        pytest.skip("runs after the tests of the operators")
    assert len(CUT) >= 70, sorted(CUT)


# -- CUDA's decisions --------------------------------------------------------------------------------------------------


#: What torch says of a GPU that is not there: a build without CUDA, and a build with it on a machine without a driver.
ABSENT = (
    "not linked with support for cuda",
    "not compiled with CUDA",
    "Found no NVIDIA driver",
    "driver version is insufficient",
)

#: Operators that ask the GPU itself even of fake tensors: grid_sampler whether cuDNN has it, the others since this
#: version of torch knows no shape of what they return (``_convolution``, which F.conv2d does not come to, with torch
#: 2.9 alone).
ASKING = {"grid_sampler", "gru_cell", *(("_convolution",) if torch.__version__ < "2.10" else ())}


def captured_on_cuda(call: Called, dtype: torch.dtype) -> Op:
    inputs = tuple(
        torch.empty(x.shape, dtype=dtype if x.dtype in (FP16, BF16) else x.dtype, device="meta") for x in call.tensors
    )
    with entered(Autocast((("cuda", dtype),))):
        try:
            graph = capture(call, inputs, device="cuda")
        except CaptureError as error:
            if call.function.__name__ in ASKING and any(text in str(error) for text in ABSENT):
                pytest.skip(f"torch {torch.__version__} runs {call.function.__name__} on no fake tensors: {error}")
            raise
    found = operator(graph)
    assert found is not None, [op.kind for op in graph.ops]
    return found


def computed_in(op: Op) -> set[torch.dtype]:
    """The dtypes of an operator's floating inputs, as it takes them."""
    set_to = op.argument("dtype")
    return {set_to or v.dtype for v in op.inputs if v.dtype.is_floating_point}


def cuda_entries(*names: str) -> list[Any]:
    torch.manual_seed(0)
    return [
        pytest.param(call, id=f"{operator}-{i}")
        for i, (_, operator, call) in enumerate(listed(AutocastTestLists("cpu"), list(names)))
        if operator != "equal"
    ]


@pytest.mark.parametrize("call", cuda_entries("torch_fp16", "nn_fp16", "linalg_fp16", "methods_fp16"))
def test_cuda_casts_to_half(call: Called) -> None:
    for dtype in (FP16, BF16):
        op = captured_on_cuda(call, dtype)
        assert computed_in(op) == {dtype} == {v.dtype for v in op.outputs}


@pytest.mark.parametrize("call", cuda_entries("torch_fp32", "nn_fp32", "methods_fp32"))
def test_cuda_casts_to_float32(call: Called) -> None:
    for dtype in (FP16, BF16):
        op = captured_on_cuda(call, dtype)
        assert computed_in(op) == {FP32} == {v.dtype for v in op.outputs}


@pytest.mark.parametrize("call", cuda_entries("torch_need_autocast_promote"))
def test_cuda_casts_to_the_widest(call: Called) -> None:
    for dtype in (FP16, BF16):
        op = captured_on_cuda(call, dtype)
        assert computed_in(op) == {FP32} == {v.dtype for v in op.outputs}


@pytest.mark.parametrize("call", cuda_entries("torch_expect_builtin_promote", "methods_expect_builtin_promote"))
def test_cuda_leaves_promotion_to_the_operator(call: Called) -> None:
    op = captured_on_cuda(call, FP16)
    assert op.outputs[0].dtype in (FP32, torch.bool)
    assert op.kind in ("cat", "stack") or computed_in(op) == {FP16, FP32}


def test_cuda_bans_binary_cross_entropy() -> None:
    for name, args, owner in AutocastTestLists("cpu").banned:
        with pytest.raises(CaptureError, match="unsafe to autocast") as raised:
            captured_on_cuda(Called(getattr(owner, name), args, {}), FP16)
        assert "test_autocast_lists.py" in raised.value.source


# -- every kernel of autocast ------------------------------------------------------------------------------------------


def run(graph: Graph, inputs: list[Tensor]) -> list[Any]:
    """A captured program on one device, without autocast."""
    held: dict[str, Any] = dict(zip([v.name for v in graph.inputs], inputs)) | graph.constants
    for op in graph.ops:
        args, kwargs = pytree.tree_map_only(Value, lambda v: held[v.name], (op.args, op.kwargs))
        made = op.target(*args, **kwargs)
        held.update(
            (v.name, x)
            for v, x in zip(op.outputs, made if isinstance(made, (tuple, list)) else [made])
            if v is not None
        )
    return [held[v.name] if isinstance(v, Value) else v for v in graph.outputs]


#: Operators with kernels of autocast that no program calls by themselves: they lie within others, or on other devices.
WITHIN = {
    "_convolution",
    "_grid_sampler_2d_cpu_fallback",
    "_lu_with_info",
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "_native_multi_head_attention",
    "_addmm_activation",
    "convolution",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_cudnn_rnn",
    "mkldnn_rnn_layer",
    "multilabel_margin_loss_forward",
    "chain_matmul",
    "conv_tbc",
    "gru_cell",
    "lstm_cell",
    "rnn_relu_cell",
    "rnn_tanh_cell",
    "nll_loss2d",
    "frobenius_norm",
    "nuclear_norm",
    "inverse",
    "orgqr",
    "_upsample_bicubic2d_aa",
}


#: Operators whose CPU kernel calls, out of sight of fake tensors, operators that autocast casts.
HIDDEN = {"bilinear"}


def same_bits(a: Any, b: Any) -> bool:
    if not isinstance(b, Tensor):
        return a == b
    a, b = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (a, b))
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])


def of_functional() -> dict[str, Called]:
    """Calls of operators that torch's own database of examples knows under other names."""
    images = {n: torch.randn(2, 4, *[6] * n) for n in (1, 2, 3)}
    out = {
        "cross_entropy_loss": Called(F.cross_entropy, (torch.randn(8, 4), torch.randint(0, 4, (8,))), {}),
        "fake_quantize_per_tensor_affine": Called(
            torch.fake_quantize_per_tensor_affine, (torch.randn(4), 0.1, 0, 0, 255), {}
        ),
        "grid_sampler": Called(F.grid_sample, (images[2], torch.rand(2, 3, 3, 2)), {"align_corners": False}),
    }
    for kind in ("reflection", "replication"):
        for n, x in images.items():
            mode = {"reflection": "reflect", "replication": "replicate"}[kind]
            out[f"{kind}_pad{n}d"] = Called(F.pad, (x, (1,) * 2 * n, mode), {})
    for name, n, mode in (
        ("nearest1d", 1, "nearest"),
        ("nearest2d", 2, "nearest"),
        ("nearest3d", 3, "nearest"),
        ("linear1d", 1, "linear"),
        ("bilinear2d", 2, "bilinear"),
        ("bicubic2d", 2, "bicubic"),
        ("trilinear3d", 3, "trilinear"),
        ("_exact1d", 1, "nearest-exact"),
        ("_exact2d", 2, "nearest-exact"),
        ("_exact3d", 3, "nearest-exact"),
    ):
        key = f"_upsample_nearest{name}" if name.startswith("_") else f"upsample_{name}"
        out[key] = Called(F.interpolate, (images[n],), {"scale_factor": 2, "mode": mode})
    return out


def kernels() -> set[str]:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    return {
        n[6:].partition(".")[0]
        for n in names
        for key in ("AutocastCPU", "AutocastCUDA")
        if torch._C._dispatch_has_kernel_for_dispatch_key(n, key)
    }


#: The most calls that are captured as one module.
TOGETHER = 24


class Several(nn.Module):
    """Calls one after another; their tensors are the module's inputs."""

    def __init__(self, calls: list[Called]) -> None:
        super().__init__()
        self.calls = nn.ModuleList(calls)

    def forward(self, *tensors: Tensor) -> list[Any]:
        rest = iter(tensors)
        return [call(*(next(rest) for _ in call.places)) for call in self.calls]


def outputs_and_captured(
    calls: list[Called], inputs: list[list[Tensor]], dtype: torch.dtype
) -> tuple[list[list[Any]], list[list[Any]]] | CaptureError:
    """By call, its results on one device under autocast, and those of the captured program without it."""
    net, flat = Several(calls), [x for each in inputs for x in each]
    with torch.autocast("cpu", dtype), warnings.catch_warnings():
        torch.manual_seed(0)
        expected = [pytree.tree_leaves(made) for made in net(*(x.clone() for x in flat))]
        try:
            graph = capture(net, tuple(x.clone() for x in flat))
        except CaptureError as error:
            return error
    torch.manual_seed(0)
    made = iter(run(graph, [x.clone() for x in flat]))
    got = [[next(made) for _ in each] for each in expected]
    assert next(made, made) is made
    return expected, got


@pytest.mark.long
def test_every_kernel_of_autocast_is_decided_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device under autocast and the captured program without it agree in every bit, for an example of every
    operator that has a kernel for the autocast of CPUs or GPUs."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db  # five seconds
    from torch.testing._internal.opinfo import core

    for module in (common_utils, core):  # each sample would look for a unittest in all frames
        monkeypatch.setattr(module, "extract_test_fn", lambda: None)
    registered, calls = kernels(), of_functional()
    for info in op_db:
        for name in {info.name.replace(".", "_"), info.aten_name, info.name.rpartition(".")[2]} & registered:
            if name in calls or not info.supports_dtype(FP32, "cpu"):
                continue
            sample = next(
                (
                    s
                    for s in info.sample_inputs("cpu", FP32)
                    if isinstance(s.input, (Tensor, list, tuple))
                    and all(x.numel() for x in pytree.tree_leaves((s.input, s.args)) if isinstance(x, Tensor))
                ),
                None,
            )
            if sample is not None:
                calls[name] = Called(info.op, (sample.input, *sample.args), sample.kwargs)
    assert registered - set(calls) <= WITHIN, sorted(registered - set(calls) - WITHIN)
    compared, refused, other = set(), {}, set()
    for dtype, halves in ((BF16, False), (BF16, True), (FP16, False)):
        given_to: dict[str, list[Tensor]] = {}
        for name, call in calls.items():
            inputs = [x.detach().to(dtype) if halves and x.dtype == FP32 else x.detach() for x in call.tensors]
            with torch.autocast("cpu", dtype), warnings.catch_warnings(), contextlib.suppress(RuntimeError):
                call(*(x.clone() for x in inputs))
                given_to[name] = inputs  # others do not run in this precision on a CPU
        alone = [name for name in given_to if name in refused]
        rest = [name for name in given_to if name not in refused]
        pending = [[name] for name in alone] + [rest[i : i + TOGETHER] for i in range(0, len(rest), TOGETHER)]
        for names in pending:
            both = outputs_and_captured([calls[name] for name in names], [given_to[name] for name in names], dtype)
            if isinstance(both, CaptureError):
                half = len(names) // 2
                if half:  # which of them it is that cannot be captured
                    pending += [names[:half], names[half:]]
                else:
                    refused[names[0]] = str(both)
                continue
            for name, expected, got in zip(names, *both, strict=True):
                assert [getattr(x, "dtype", None) for x in got] == [getattr(x, "dtype", None) for x in expected], name
                if not all(same_bits(a, b) for a, b in zip(got, expected)):
                    other.add(name)
                compared.add(name)
    assert other <= HIDDEN, other - HIDDEN
    assert not [name for name, error in refused.items() if "internal" in error], refused
    assert len(compared) > 130 and len(compared) + len(refused) > 150, (len(compared), refused)
