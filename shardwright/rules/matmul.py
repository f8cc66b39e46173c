"""Matrix products: matmul and its relatives, linear, einsum, and grouped products.

1. *Products*. The device matrix has the batch factors first, then the rows, the contracted factors, the columns,
   however an operand is stored. A cut contraction leaves a partial sum. A term beside the product is added once: a
   bias to the term of the first ranks along the contraction, so that the sum stays partial and its redistribution may
   be a reduce-scatter; any other term to the completed sum.

2. *Grouped products*, the products of a mixture of experts: groups of rows, each with a matrix of its own.

       out[i, n] = Σk x[i, k] · w[group of i, k, n]        the end of each group is data, one number a group

   The widths k and n may be cut; k leaves a partial sum. Groups stay whole, and so do the rows that form them.

Example: x [8, 4] times w [4, 6] on 4 devices, rows and k cut twice each. A rank multiplies [4, 2] by [2, 6]; the ranks
of one half of the rows have two terms of one [4, 6].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..graph import Op, Value
from ..torch_private import operators
from .dims import all_whole, compound, cut_size, local_operator, named, normal, operand, part_length, starts
from .notation import Assignment, Bound
from .registry import Builder, Expansion, Rule, register

__all__ = ["FLOPS"]

aten = torch.ops.aten


def _matmul(op: Op) -> str:
    """The notation of matmul: vectors, matrices and batches of them; batch dims broadcast, aligned on the right."""
    a, b = (len(v.shape) for v in op.inputs)
    batch = named(max(a, b, 2) - 2, "b")
    rows, columns = ["m"] * (a > 1), ["n"] * (b > 1)
    left = batch[len(batch) - max(a - 2, 0) :] + rows + ["k"]
    right = [*batch[len(batch) - max(b - 2, 0) :], "k", *columns]
    return _product((left, right), batch + rows + columns, first=batch)


def _product(inputs: Sequence[Sequence[str]], out: Sequence[str], first: Sequence[str] = ()) -> str:
    """The notation of a product; `first` are the factors that come first in the device matrix."""
    order = f"{' '.join(first)}: " if first else ""
    return f"{order}{', '.join(map(operand, inputs))} -> {operand(out)}"


def _linear(op: Op) -> str:
    if len(op.inputs[1].shape) == 1:
        return "... k, k -> ..."
    if len(op.inputs) == 3 and len(op.inputs[2].shape) > 1:
        return "... k!, n k!, ... n? -> ... n"
    return "... k, n k" + (", n?" if len(op.inputs) == 3 else "") + " -> ... n"


def _bias_after(op: Op, bound: Bound, assignment: Assignment, contracted: Sequence[str]) -> Expansion | None:
    """Add the bias, the last input, after the product."""
    *factors, bias = op.inputs
    if op.argument("bias") is None or cut_size(bound, assignment, contracted) == 1:
        return None
    return lambda b: b.call(aten.add.Tensor, b.call(op.target, *factors), bias)


def _expand_linear(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    bias = op.argument("bias")
    if bias is None or cut_size(bound, assignment, "k") == 1:
        return None
    x, weight = op.inputs[:2]

    return lambda b: b.call(linear_part, x, weight, bias, starts(b, bias, x, len(x.shape) - 1))


@local_operator("linear_part(Tensor x, Tensor weight, Tensor bias, Tensor starts) -> Tensor")
def linear_part(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """linear over a part of the contracted dim; the first part adds the bias."""
    return torch.nn.functional.linear(x, weight, torch.where(starts[0] == 0, bias, 0))


def _linear_part(op: Op) -> tuple[str, dict[str, int]]:
    parts = op.inputs[3].shape[0]
    return "... (p q!), n (p q!), n, p -> ... n", {"p": parts, "q": part_length(op.inputs[0].shape[-1], parts)}


def _bilinear(op: Op) -> str:
    return "... i, ... j, n i j" + (", n?" if len(op.inputs) == 4 else "") + " -> ... n"


def _expand_bilinear(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    return _bias_after(op, bound, assignment, "ij")


def _added(left: str, right: str, out: str) -> Callable[[Op], str]:
    """The notation of addmm and its relatives: the added term broadcasts against the product, aligned on the right."""

    def notation(op: Op) -> str:
        term = [f"{name}?" for name in out.split()[len(out.split()) - len(op.inputs[0].shape) :]]
        order = " ".join(dict.fromkeys((left + " " + right).split()))
        return f"{order}: {operand(term)}, {left}, {right} -> {out}"

    return notation


def _expand_added(
    product: Callable[[Builder, Value, Value], Value], contracted: str
) -> Callable[[Op, Bound, Assignment], Expansion | None]:
    def expand(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
        if cut_size(bound, assignment, contracted) == 1:
            return None
        added, left, right = op.inputs
        beta, alpha = op.argument("beta"), op.argument("alpha")

        def work(b: Builder) -> Value:
            made = product(b, left, right)
            if alpha != 1:
                made = b.call(aten.mul.Tensor, made, alpha)
            if beta == 0:
                return made  # the added term is then not read: it may hold NaN
            return b.call(aten.add.Tensor, made, added if beta == 1 else b.call(aten.mul.Tensor, added, beta))

        return work

    return expand


def _called(target: Callable[[Value, Value], object]) -> Callable[[Builder, Value, Value], Value]:
    return lambda b, left, right: b.call(target, left, right)


def _summed_bmm(b: Builder, left: Value, right: Value) -> Value:
    return b.call(aten.einsum.default, "bmk,bkn->mn", [left, right])


def _tensordot(op: Op) -> str:
    a, b = (len(v.shape) for v in op.inputs)
    left, right = named(a, "m"), named(b, "n")
    for i, j in zip(op.argument("dims_self"), op.argument("dims_other")):
        left[normal(i, a)] = right[normal(j, b)] = f"k{normal(i, a)}"
    rows, columns = [n for n in left if n not in right], [n for n in right if n not in left]
    return _product((left, right), rows + columns, first=rows)


def _inner_product(op: Op) -> str:
    a, b = (len(v.shape) for v in op.inputs)
    if not a or not b:
        return "..., ... -> ..."
    left, right = named(a - 1, "m"), named(b - 1, "n")
    return _product(([*left, "k"], [*right, "k"]), left + right)


def _chain(op: Op) -> str:
    """The notation of a chain of matrices; the first and the last may be vectors."""
    last = len(op.inputs) - 1
    texts = [[f"k{i}", f"k{i + 1}"] for i in range(last + 1)]
    if len(op.inputs[0].shape) == 1:
        texts[0] = ["k1"]
    if len(op.inputs[last].shape) == 1:
        texts[last] = [f"k{last}"]
    return _product(texts, [n for n in ("k0", f"k{last + 1}") if n in texts[0] + texts[last]])


def _kron(op: Op) -> tuple[str, dict[str, int]]:
    a, b = (v.shape for v in op.inputs)
    rank = max(len(a), len(b))
    left, right = ((1,) * (rank - len(s)) + tuple(s) for s in (a, b))
    sizes = {f"a{i}": s for i, s in enumerate(left)} | {f"b{i}": s for i, s in enumerate(right)}
    out = [compound([f"a{i}", f"b{i}"]) for i in range(rank)]
    return _product((named(rank, "a")[rank - len(a) :], named(rank, "b")[rank - len(b) :]), out), sizes


def _einsum(op: Op) -> str:
    """The notation of einsum, read from its equation.

    A letter that occurs twice in one operand (a diagonal) stays whole.
    """
    left, arrow, right = op.argument("equation").replace(" ", "").partition("->")
    terms = left.split(",")
    dots = max((len(v.shape) - len(t.replace("...", "")) for t, v in zip(terms, op.inputs) if "..." in t), default=0)
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        right = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    ellipsis = named(dots, "dot")

    def spelled(term: str, rank: int) -> list[str]:
        before, some, after = term.partition("...")
        hidden = ellipsis[dots - (rank - len(before + after)) :] if some else []
        return [*before, *hidden, *after]

    inputs = [spelled(t, len(v.shape)) for t, v in zip(terms, op.inputs)]
    out = spelled(right, len(op.output(0).shape))
    order: list[str] = []
    if len(inputs) == 2:
        a, b = inputs
        order = [n for n in a if n in b and n in out] + [n for n in a if n not in b] + [n for n in a if n in b]
    order = list(dict.fromkeys([*(n for n in ellipsis if any(n in t for t in inputs)), *order]))
    twice = {n for term in inputs for n in term if term.count(n) > 1}
    order = [n for n in order if n not in twice]
    inputs = [[f"{n}{t}{i}!" if n in twice else n for i, n in enumerate(term)] for t, term in enumerate(inputs)]
    return _product(inputs, [f"{n}out!" if n in twice else n for n in out], first=order)


def _scaled(op: Op) -> str:
    """The notation of a product of float8 matrices with a scale for each matrix, or for each row and each column.

    A bias, or a scale of the result, goes with the whole sum. Scales of blocks keep all dims whole.
    """
    a, b, scale_a, scale_b, *beside = op.inputs
    scales = []
    for scale, name, shape in ((scale_a, "m", (a.shape[0], 1)), (scale_b, "n", (1, b.shape[1]))):
        if scale.numel != 1 and scale.shape != shape:
            return all_whole(op)
        scales.append(operand([name if size != 1 else "1" for size in scale.shape]))
    k = "k!" if beside else "k"
    further = [operand(["n" if size != 1 else "1" for size in v.shape]) for v in beside]
    return f"{', '.join((f'm {k}', f'{k} n', *scales, *further))} -> m n"


def _of_two(op: Op) -> bool:
    return len(op.inputs) == 2


register((aten.matmul.default,), Rule(_matmul, neutral=0, product=True))
register((aten.mm.default,), Rule("m k, k n -> m n", neutral=0, product=True))
register(operators("_scaled_mm"), Rule(_scaled))
#: torchao's linear layer: `convert_to_float8_training`. Each rank scales by the maxima of its own slices.
register(("torchao.float8.float8_linear.matmul_with_hp_or_float8_args",), Rule("... k, k n -> ... n"))
register((aten.bmm.default,), Rule("b m k, b k n -> b m n", neutral=0, product=True))
register((aten.mv.default,), Rule("m k, k -> m", neutral=0, product=True))
register((aten.dot.default, aten.vdot.default), Rule("k, k -> ", neutral=0))
register((aten.outer.default, aten.ger.default), Rule("m, n -> m n", product=True))
register((aten.inner.default,), Rule(_inner_product, neutral=0, product=True))
register((aten.tensordot.default,), Rule(_tensordot, neutral=0, product=True))
register((aten.linalg_multi_dot.default, aten.chain_matmul.default), Rule(_chain, neutral=0))
register((aten.kron.default,), Rule(_kron))
register((linear_part,), Rule(_linear_part, neutral=0))
register((aten.linear.default,), Rule(_linear, expand=_expand_linear, neutral=0, product=True))
register((aten.bilinear.default,), Rule(_bilinear, expand=_expand_bilinear, neutral=0))
register(
    (aten.addmm.default,),
    Rule(_added("m k", "k n", "m n"), expand=_expand_added(_called(aten.mm.default), "k"), neutral=0),
)
register(
    (aten.baddbmm.default,),
    Rule(_added("b m k", "b k n", "b m n"), expand=_expand_added(_called(aten.bmm.default), "k"), neutral=0),
)
register(
    (aten.addmv.default,), Rule(_added("m k", "k", "m"), expand=_expand_added(_called(aten.mv.default), "k"), neutral=0)
)
register((aten.addr.default,), Rule(_added("m", "n", "m n")))
register(
    (aten.addbmm.default,), Rule(_added("b m k", "b k n", "m n"), expand=_expand_added(_summed_bmm, "bk"), neutral=0)
)
register((aten.einsum.default,), Rule(_einsum, neutral=0, product=_of_two))


# -- grouped products

#: The strides of the operands of torch's kernel are multiples of so many bytes.
_ALIGNED = 16


def _grouped(op: Op) -> str | tuple[str, dict[str, int]]:
    """The notation of a grouped product.

    Groups are rows of the first operand, columns of the second, parts of the contracted dim, or stacked matrices.
    Widths are cut into whole units of the kernel's alignment.
    """
    x, w = op.inputs[:2]
    if op.argument("bias") is not None:
        return all_whole(op)
    ranks, sizes = (len(x.shape), len(w.shape)), {}

    def width(name: str, size: int) -> str:
        unit = max(_ALIGNED // x.dtype.itemsize, 1)
        if size % unit:
            return f"{name}!"
        sizes[name], sizes[f"{name}unit"] = size // unit, unit
        return f"({name} {name}unit!)"

    k, n = width("k", x.shape[-1]), width("n", w.shape[-1])
    m = width("m", x.shape[-2]) if ranks == (2, 2) else "m"
    text = {
        (2, 3): f"rows! {k}, e! {k} {n}, e! -> rows! {n}",
        (3, 2): f"e! m {k}, {k} columns!, e! -> m columns!",
        (2, 2): f"{m} rows!, rows! {n}, e! -> e! {m} {n}",
        (3, 3): f"e {m} {k}, e {k} {n} -> e {m} {n}",
    }.get(ranks)
    if text is None or text.count(",") + 1 != len(op.inputs):
        return all_whole(op)
    return text, {
        name: size
        for name, size in sizes.items()
        if name in text.replace("(", " ").replace("!", " ").replace(")", " ").split()
    }


def _flops(x: torch.Tensor, w: torch.Tensor, *args: object, **kwargs: object) -> int:
    """Flops: each row is multiplied by one matrix."""
    rows = x.shape[0] * x.shape[1] if x.dim() == w.dim() == 3 else x.shape[-2]
    return 2 * rows * x.shape[-1] * w.shape[-1]


_FALLBACK = "transformers::grouped_mm_fallback"

#: Name of an operator -> a function of its arguments that returns its flops; these are missing in torch's table.
FLOPS = {
    "aten::_grouped_mm": _flops,
    _FALLBACK: _flops,
    f"{_FALLBACK}_backward": lambda *args, **kwargs: 2 * _flops(*args, **kwargs),
}

register(operators("_grouped_mm"), Rule(_grouped, neutral=0))
register((_FALLBACK,), Rule("rows! k, e! k n, e! -> rows! n", neutral=0))
