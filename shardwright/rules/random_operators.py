"""Random operators: each is expanded into the numbers that belong to the positions of the whole tensor (`counter_rng`).

    dropout          x · mask / (1-p)                       feature forms: one number a channel
    alpha_dropout    x · kept·a + (kept·α·a - α·a + α·a·p)  α = 1.758…, a = 1/√((α²p + 1)(1-p))
    bernoulli        [uniform < p]
    normal           mean + std · normal
    geometric        ⌈exponential / -log(1-p)⌉,  cauchy  median + σ tan π(uniform - ½),  log_normal  e^normal
    randint          low + integer mod (high - low)
    rrelu            x · (1 where x > 0, else uniform in [lower, upper))

Any dim may be cut. A permutation is produced whole, and the classes of a multinomial stay whole. No gradient goes
through a random number. In evaluation, and where nothing is dropped, an operator is not expanded. In the graph of one
micro-batch the numbers are those of its rows in the whole batch (`Op.micro`).

Example: dropout with p = 0.2 of 8 rows cut in 2. Rank 1 computes the numbers of rows 4 to 7 of the whole tensor, so the
same elements are dropped as on one device; the others are divided by 0.8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import MissingRuleError
from ..graph import SEED, Op, Value, map_values
from ..layout import Digits, digits_size
from .dims import named, operand, part_length, whole, wide
from .notation import Assignment, Bound
from .random_numbers import counter_rng  # noqa: F401  (defines the operators)
from .random_numbers.dropout import drop
from .registry import (
    POINTWISE,
    Builder,
    Described,
    Expansion,
    Local,
    Rule,
    bound_rule,
    expand,
    find_rule,
    local_output_shape,
    register,
)

__all__ = ["dropped", "numbers_of", "pieces", "placed", "run_on_one"]

aten = torch.ops.aten
mask = torch.ops.shardwright.mask.default
draw = torch.ops.shardwright.draw.default
permutation = torch.ops.shardwright.permutation.default
choose = torch.ops.shardwright.choose.default

ALPHA = 1.7580993408473766  # scale times alpha of a SELU

#: Bits of the largest range in which a floating dtype has every whole number: the range of ``random_``.
_WHOLE_NUMBERS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


# -- the operators of counter_rng --------------------------------------------------------------------------------------


def placed(op: Op, size: Sequence[int]) -> tuple[list[str], list[str], dict[str, int]]:
    """The texts of the starts and of the dims of a tensor; a cut dim is (parts, size of a part)."""
    starts, dims = op.argument("starts"), op.argument("dims")
    texts, sizes = whole(named(len(size), "w")), {}
    for start, d in zip(starts, dims):
        texts[d] = f"(p{d} q{d}!)"
        sizes[f"q{d}"] = part_length(size[d], start.shape[0])
    return [f"p{d}" for d in dims], texts, sizes


def _numbers_text(op: Op) -> tuple[str, dict[str, int]]:
    """The notation of mask and draw: the seed, the starts, and the tensor that gives the device.

    Dims of that tensor with another size than the output's may be cut freely.
    """
    starts, texts, sizes = placed(op, op.output(0).shape)
    like = op.argument("like")
    lent = []
    if like is not None:
        shape = op.output(0).shape
        lent = [
            operand([text if size == like.shape[d] else f"l{d}" for d, (text, size) in enumerate(zip(texts, shape))])
        ]
    return f"{', '.join(['seed!', *starts, *lent])} -> {operand(texts)}", sizes


def _local_numbers(op: Op, bound: Bound, assignment: Assignment) -> Local:
    args, kwargs = op.with_arguments(size=list(local_output_shape(bound, assignment)))
    return Local(op.target, args, kwargs)


def _dropping_text(op: Op) -> tuple[str, dict[str, int]]:
    """The notation of a dropout: the seed, the starts, and x; its result and its mask."""
    starts, texts, sizes = placed(op, op.output(0).shape)
    out = operand(texts)
    return f"{', '.join(['seed!', *starts, out])} -> {out}, {out}", sizes


def _choose_text(op: Op) -> tuple[str, dict[str, int]]:
    starts, texts, sizes = placed(op, op.output(0).shape[:-1])
    return f"{', '.join(['seed!', *starts])}, {operand([*texts, 'c!'])} -> {operand([*texts, 's!'])}", sizes


register((mask, draw), Rule(_numbers_text, reduction="none", localize=_local_numbers))
register((drop,), Rule(_dropping_text, reduction="none", localize=_local_numbers))
register((permutation,), Rule("seed! -> n!"))
register((choose,), Rule(_choose_text))


# -- torch's operators, expanded ---------------------------------------------------------------------------------------


class _Place:
    """Numbers for the positions of a tensor, within a builder.

    Args:
        shape: of the whole tensor.
        dims: the digits that cut each of its dims.
        like: gives the device; None: `device`.
    """

    def __init__(
        self,
        b: Builder,
        op: Op,
        shape: Sequence[int],
        dims: Sequence[Digits],
        like: Value | None,
        device: torch.device | None = None,
    ) -> None:
        self.b, self.op, self.shape, self.device = b, op, list(shape), device
        self.like = b.call(aten.detach.default, like) if like is not None and like.requires_grad else like
        self.dims, self.starts = _cut(b, shape, dims)
        self.micro = pieces(op, shape)

    @classmethod
    def of(cls, b: Builder, op: Op, x: Value) -> _Place:
        """Numbers for each element of `x`, with the layout of `x`."""
        return cls(b, op, x.shape, b.layouts[x.name].tensor_dims, x)

    @property
    def where(self) -> tuple[object, ...]:
        return SEED, self.starts, self.like, self.dims, self.shape, self.shape, self.op.number

    def mask(self, p: float, dtype: torch.dtype = torch.bool) -> Value:
        """1 with probability p, else 0."""
        return self.b.call(mask, *self.where, p, dtype, self.device, *self.micro)

    def numbers(self, kind: str, dtype: torch.dtype) -> Value:
        """Numbers of one of `counter_rng.KINDS`."""
        return self.b.call(draw, *self.where, kind, dtype, self.device, *self.micro)


def pieces(op: Op, shape: Sequence[int]) -> list[list[int]]:
    """The last argument (`micro`) of a call that draws numbers for a tensor of that shape.

    Empty where the tensor has no rows of the batch: a feature dropout for a batch in a dim that shares one number, say.
    """
    out = op.output(0)
    assert out is not None
    has_rows = op.micro is not None and op.micro.dim < len(shape) and shape[op.micro.dim] == out.shape[op.micro.dim]
    return [list(op.micro)] if op.micro is not None and has_rows else []


def _starts(b: Builder, size: int, digits: Digits) -> Value:
    parts = digits_size(digits)
    length = part_length(size, parts)
    made = b.call(aten.arange.start_step, 0, parts * length, length, dtype=torch.int64, device=torch.device("cpu"))
    return b.lay(made, [digits])


def _cut(b: Builder, shape: Sequence[int], dims: Sequence[Digits]) -> tuple[list[int], list[Value]]:
    """The dims that are cut, and the start of each rank's slice in each of them."""
    cut = [d for d, digits in enumerate(dims) if digits]
    return cut, [_starts(b, shape[d], dims[d]) for d in cut]


def numbers_of(b: Builder, op: Op, shape: Sequence[int], dims: Sequence[Digits]) -> tuple[object, ...]:
    """The first arguments of an operator that draws its numbers inside: seed, starts, cut dims, whole sizes, number.

    Args:
        shape: of the whole tensor of numbers.
        dims: the digits that cut each of its dims.
    """
    cut, starts = _cut(b, shape, dims)
    return SEED, starts, cut, list(shape), op.number


def dropped(b: Builder, op: Op, x: Value, p: float) -> Value:
    """Dropout of a value during the expansion of an operator; the numbers are those of `op`."""
    return _in_one(b, op, x, p)[0]


def _in_one(b: Builder, op: Op, x: Value, p: float) -> tuple[Value, Value]:
    """The dropout of a value, and its mask."""
    shape, (dims, starts) = list(x.shape), _cut(b, x.shape, b.layouts[x.name].tensor_dims)
    made: tuple[Value, Value] = b.call(drop, SEED, starts, x, dims, shape, shape, op.number, p, *pieces(op, shape))
    return made


def _scaled(b: Builder, x: Value, keep: Value, p: float) -> Value:
    """``x · keep / (1-p)``, of a mask that several elements share."""
    return b.call(aten.mul.Tensor, b.call(aten.mul.Tensor, x, keep), 1 / (1 - p) if p < 1 else 0.0)


def _drops(op: Op) -> float:
    """The probability of a dropout: 0 in evaluation."""
    return op.argument("p") if op.argument("train") in (True, None) else 0.0


def _expand_dropout(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    x, p = op.inputs[0], _drops(op)
    if not p:
        return None

    def work(b: Builder) -> Value | tuple[Value, Value]:
        if op.kind == "native_dropout":
            made, keep = _in_one(b, op, x, p)
            return made, b.to(keep, op.output(1).dtype)
        if op.kind == "dropout":
            return dropped(b, op, x, p)
        place = _Place.of(b, op, x)
        if op.kind.startswith("feature"):
            layout, further = b.layouts[x.name].tensor_dims, len(x.shape) - 2
            place = _Place(b, op, [*x.shape[:2], *[1] * further], [*layout[:2], *[()] * further], x)
        if "alpha" not in op.kind or p == 1:
            return _scaled(b, x, place.mask(1 - p), p)
        a = 1 / math.sqrt((ALPHA**2 * p + 1) * (1 - p))
        keep = place.mask(1 - p, x.dtype)
        shift = b.call(aten.sub.Tensor, b.call(aten.mul.Tensor, keep, ALPHA * a), ALPHA * a * (1 - p))
        return b.call(aten.add.Tensor, b.call(aten.mul.Tensor, x, b.call(aten.mul.Tensor, keep, a)), shift)

    return work


def _expand_rrelu(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if not op.argument("training"):
        return None
    x, lower, upper = op.inputs[0], op.argument("lower"), op.argument("upper")

    def work(b: Builder) -> Value:
        slope = b.call(
            aten.add.Tensor,
            b.call(aten.mul.Tensor, _Place.of(b, op, x).numbers("uniform", x.dtype), upper - lower),
            lower,
        )
        above = b.call(aten.gt.Scalar, b.call(aten.detach.default, x), 0)
        return b.call(aten.mul.Tensor, x, b.call(aten.where.ScalarSelf, above, 1, slope))

    return work


def _uniform(b: Builder, op: Op, place: _Place, dtype: torch.dtype) -> Value:
    drawn = place.numbers("uniform", dtype)
    low, high = op.argument("from", 0.0), op.argument("to", 1.0)
    if (low, high) == (0.0, 1.0):
        return drawn
    return b.call(aten.add.Tensor, b.call(aten.mul.Tensor, drawn, high - low), low)


def _normal(b: Builder, op: Op, place: _Place, dtype: torch.dtype) -> Value:
    mean, std = (
        b.call(aten.detach.default, x) if isinstance(x, Value) and x.requires_grad else x  # as in torch
        for x in (op.argument("mean", 0.0), op.argument("std", 1.0))
    )
    out = place.numbers("normal", dtype)
    if isinstance(std, Value) or std != 1:
        out = b.call(aten.mul.Tensor, out, std)
    return b.call(aten.add.Tensor, out, mean) if isinstance(mean, Value) or mean != 0 else out


def _log_normal(b: Builder, op: Op, place: _Place, dtype: torch.dtype) -> Value:
    return b.call(aten.exp.default, _normal(b, op, place, dtype))


def _exponential(b: Builder, op: Op, place: _Place, dtype: torch.dtype) -> Value:
    drawn, rate = place.numbers("exponential", dtype), op.argument("lambd")
    return b.call(aten.div.Tensor, drawn, rate) if rate != 1 else drawn


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers are computed: float64 only for results that it alone can hold, as not every device has
    it."""
    return torch.float32 if dtype in (torch.float32, torch.float16, torch.bfloat16) else torch.float64


#: The probability above which float32 has every whole number that a geometric draw can give: 2⁻⁵⁴ ≤ u, and
#: log(2⁵⁴) / p < 2²⁴.
_LIKELY = 54 * math.log(2) / 2**24


def _geometric(b: Builder, op: Op, place: _Place, dtype: torch.dtype) -> Value:
    p = op.argument("p")
    computed = torch.float32 if p > _LIKELY else _computed_in(dtype)
    waited = b.call(aten.div.Tensor, place.numbers("exponential", computed), -math.log1p(-p))
    return b.to(b.call(aten.clamp_min.default, b.call(aten.ceil.default, waited), 1), dtype)


def _cauchy(b: Builder, op: Op, place: _Place, dtype: torch.dtype) -> Value:
    drawn = place.numbers("uniform", _computed_in(dtype))
    turned = b.call(aten.mul.Tensor, b.call(aten.sub.Tensor, drawn, 0.5), math.pi)
    made = b.call(aten.mul.Tensor, b.call(aten.tan.default, turned), op.argument("sigma"))
    return b.to(b.call(aten.add.Tensor, made, op.argument("median")), dtype)


def _integers(b: Builder, op: Op, place: _Place, dtype: torch.dtype) -> Value:
    low, high = op.argument("low", 0), op.argument("high", op.argument("to"))
    if high is None:  # ``random_()``: the range of the dtype
        high = (
            2 ** _WHOLE_NUMBERS[dtype] + 1
            if dtype.is_floating_point
            else 2
            if dtype == torch.bool
            else torch.iinfo(dtype).max + 1
        )
    drawn = place.numbers("integer", torch.int64)
    if isinstance(high, Value):
        drawn = b.call(aten.remainder.Tensor, drawn, high)
    elif high - low < 2**63:
        drawn = b.call(aten.remainder.Scalar, drawn, high - low)
    return b.to(b.call(aten.add.Tensor, drawn, low) if low else drawn, dtype)


def _bernoulli(b: Builder, op: Op, place: _Place, dtype: torch.dtype) -> Value:
    p = op.argument("p", op.inputs[0])
    if not isinstance(p, Value):
        return place.mask(p, dtype)
    return b.to(b.call(aten.lt.Tensor, place.numbers("uniform", wide(p.dtype)), p), dtype)


_Drawn = Callable[[Builder, Op, _Place, torch.dtype], Value]


def _with_rule(text: Callable[[Op], Described], make: _Drawn) -> Rule:
    """The rule of an operator that produces one tensor: like its first input, or from nothing."""

    def of_real(op: Op) -> Described:
        if op.output(0).dtype.is_complex:
            raise MissingRuleError(
                f"there is no rule for complex random numbers, as {op.target} makes",
                **op.where,
                legal="two real tensors, and torch.complex",
            )
        return text(op)

    def work_out(op: Op, bound: Bound, assignment: Assignment) -> Expansion:
        out, layout = op.output(0), bound.output_layout(0, assignment)
        assert layout is not None and layout.dims is not None
        dims = layout.dims

        def work(b: Builder) -> Value:
            like = next((v for v in op.inputs if v.shape == out.shape), None)
            return make(b, op, _Place(b, op, out.shape, dims, like, op.kwargs.get("device")), out.dtype)

        return work

    return Rule(of_real, expand=work_out)


def _from_nothing(op: Op) -> str:
    return f" -> {operand(named(len(op.output(0).shape)))}"


def _expand_permutation(op: Op, bound: Bound, assignment: Assignment) -> Expansion:
    return lambda b: b.call(permutation, SEED, op.number, op.argument("n"), op.output(0).dtype, op.kwargs.get("device"))


def _multinomial_text(op: Op) -> str:
    rows = named(len(op.inputs[0].shape) - 1)
    return f"{operand([*rows, 'c!'])} -> {operand([*rows, 's!'])}"


def _expand_multinomial(op: Op, bound: Bound, assignment: Assignment) -> Expansion:
    def work(b: Builder) -> Value:
        weights = op.inputs[0]
        rows = b.layouts[weights.name].tensor_dims[:-1]
        place = _Place(b, op, weights.shape[:-1], rows, weights)
        return b.call(
            choose,
            SEED,
            place.starts,
            place.like,
            place.dims,
            place.shape,
            op.number,
            op.argument("num_samples"),
            op.argument("replacement"),
            *place.micro,
        )

    return work


register(
    (
        aten.dropout.default,
        aten.native_dropout.default,
        aten.feature_dropout.default,
        aten.alpha_dropout.default,
        aten.feature_alpha_dropout.default,
    ),
    Rule(POINTWISE.notation, expand=_expand_dropout),
)
register((aten.rrelu.default,), Rule(POINTWISE.notation, expand=_expand_rrelu))
for makes, like_input, from_nothing in (
    (_uniform, (aten.rand_like.default, aten.uniform.default), (aten.rand.default,)),
    (
        _normal,
        (
            aten.randn_like.default,
            aten.normal_functional.default,
            aten.normal.Tensor_float,
            aten.normal.float_Tensor,
            aten.normal.Tensor_Tensor,
        ),
        (aten.randn.default, aten.normal.float_float),
    ),
    (
        _integers,
        (
            aten.randint_like.default,
            aten.randint_like.low_dtype,
            aten.randint_like.Tensor,
            aten.random.default,
            aten.random.to,
        ),
        (aten.randint.default, aten.randint.low),
    ),
    (_bernoulli, (aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor), ()),
    (_exponential, (aten.exponential.default,), ()),
    (_log_normal, (aten.log_normal.default,), ()),
    (_geometric, (aten.geometric.default,), ()),
    (_cauchy, (aten.cauchy.default,), ()),
):
    assert callable(POINTWISE.notation)
    register(like_input, _with_rule(POINTWISE.notation, makes))
    register(from_nothing, _with_rule(_from_nothing, makes))
register((aten.randperm.default,), Rule(" -> n!", expand=_expand_permutation))
register((aten.multinomial.default,), Rule(_multinomial_text, expand=_expand_multinomial))


def run_on_one(op: Op, values: Mapping[str, Tensor]) -> list[Tensor]:
    """The outputs of an operator on whole tensors, expanded as for one device.

    Args:
        op: the operator.
        values: its inputs and the seed, by name.
    """
    described = find_rule(op)
    assert described is not None
    bound = bound_rule(op, described)
    steps, renamed = expand(op, described, bound, bound.whole(1))
    values_by_name = dict(values)
    for step, *_ in steps:
        args, kwargs = map_values((step.args, step.kwargs), lambda v: values_by_name[v.name])
        made = step.target(*args, **kwargs)
        values_by_name.update(
            zip((v.name for v in step.outputs if v is not None), made if isinstance(made, (tuple, list)) else (made,))
        )
    return [values_by_name[renamed.get(v.name, v).name] for v in op.outputs if v is not None]
