"""Decompositions, inverses, determinants and solutions of matrices: batch dims may be cut, matrices stay whole.

    inv        [..., n, n] -> [..., n, n]
    slogdet    [..., n, n] -> [...], [...]
    svd        [..., m, n] -> [..., m, k], [..., k], [..., k, n]
    solve      [..., n, n], [..., n, k] -> [..., n, k]; or a vector, [..., n, n], [..., n] -> [..., n]

Batch dims of several inputs broadcast. No batch dim is padded: the padding of a batch holds no invertible matrix.

Example: inv of [8, 3, 3] with dim 0 cut in 4: each rank inverts [2, 3, 3].
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import Op, Value
from ..torch_private import operators
from .dims import operand, whole
from .registry import Rule, register

#: Operators by the numbers of dims of a matrix, or of what belongs to it: of each input -> of each output.
_KINDS: dict[tuple[tuple[int, ...], tuple[int, ...]], str] = {
    ((2,), (2,)): "linalg_inv inverse linalg_matrix_exp matrix_exp linalg_matrix_power matrix_power linalg_cholesky "
    "cholesky cholesky_inverse linalg_pinv linalg_pinv.rcond_tensor linalg_pinv.atol_rtol_tensor "
    "linalg_pinv.atol_rtol_float pinverse",
    ((2,), (0,)): "linalg_det det logdet linalg_cond linalg_matrix_rank linalg_matrix_rank.tol_tensor "
    "linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.atol_rtol_float",
    ((2,), (1,)): "linalg_svdvals linalg_eigvals linalg_eigvalsh",
    ((2,), (0, 0)): "linalg_slogdet slogdet",
    ((2,), (1, 2)): "linalg_eig linalg_eigh",
    ((2,), (2, 0)): "linalg_inv_ex linalg_cholesky_ex",
    ((2,), (2, 1)): "linalg_lu_factor linalg_ldl_factor geqrf",
    ((2,), (2, 1, 0)): "linalg_lu_factor_ex",
    ((2,), (2, 1, 2)): "linalg_svd svd",
    ((2,), (2, 2)): "linalg_qr qr",
    ((2,), (2, 2, 2)): "linalg_lu",
    ((2, 1), (2,)): "linalg_householder_product orgqr",
    ((2, 2), (2,)): "linalg_solve_triangular cholesky_solve",
    ((2, 1, 2), (2,)): "linalg_lu_solve",
}


def _sides(values: Sequence[Value | None], matrix: Sequence[int], prefix: str) -> str:
    """The texts of operands of which the last dims, as many as `matrix` says, stay whole. A further operand, such as a
    tolerance, is a number for each matrix of the batch."""
    present = [v for v in values if v is not None]
    dims = (*matrix, *(0 for _ in present))
    return ", ".join(
        operand(["...", *whole(f"{prefix}{i}_{d}" for d in range(dims[i]))]) for i, _ in enumerate(present)
    )


def _rule(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Rule:
    return Rule(lambda op: f"{_sides(op.inputs, inputs, 'i')} -> {_sides(op.outputs, outputs, 'o')}", pads=False)


def _solve(op: Op) -> str:
    """The notation of solve: the right side is a vector where it has one dim, or the shape of the matrices but one."""
    left, right = op.inputs
    vector = len(right.shape) == 1 or right.shape == left.shape[:-1]
    dims = (1 if vector else 2, 0)[: len(op.outputs)]
    return f"{_sides(op.inputs, (2, 1 if vector else 2), 'i')} -> {_sides(op.outputs, dims, 'o')}"


for _matrix, _names in _KINDS.items():
    register(operators(*_names.split()), _rule(*_matrix))
register(operators("linalg_solve", "linalg_solve_ex"), Rule(_solve, pads=False))
