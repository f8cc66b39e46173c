"""Concrete calls of decompositions, inverses, determinants and solutions of matrices."""

from __future__ import annotations

import torch
from rule_cases import fixed, rand
from rule_reference import collected

from shardwright.torch_private import operators

aten = torch.ops.aten

CASES, case = collected()


def matrices(*batch: int, size: int = 3) -> torch.Tensor:
    """Matrices that are far from singular."""
    made = fixed(rand(*batch, size, size)) / 4 + torch.diag(torch.arange(1.0, size + 1, dtype=torch.float64))
    return made.requires_grad_()


def symmetric(*batch: int, size: int = 3) -> torch.Tensor:
    """Positive definite matrices with eigenvalues that differ."""
    made = fixed(matrices(*batch, size=size))
    return (made @ made.mT + torch.diag(torch.arange(1.0, size + 1, dtype=torch.float64))).requires_grad_()


SQUARE = """linalg_inv inverse linalg_matrix_exp matrix_exp linalg_pinv.atol_rtol_tensor
    linalg_pinv.atol_rtol_float pinverse linalg_det det logdet linalg_cond linalg_svdvals linalg_slogdet slogdet
    linalg_inv_ex linalg_lu_factor linalg_lu_factor_ex linalg_qr qr linalg_lu"""
DEFINITE = "linalg_cholesky cholesky cholesky_inverse linalg_cholesky_ex linalg_eigh linalg_eigvalsh"

for target in operators(*SQUARE.split()):
    case(2, target, matrices(4, 8))
case(1, aten.linalg_inv.default, matrices(8))
for target in operators("linalg_pinv"):
    case(2, target, matrices(4, 8), 1e-9)
for target in operators("linalg_pinv.rcond_tensor"):
    case(2, target, matrices(4, 8), torch.full((8,), 1e-9, dtype=torch.float64))
for target in operators("linalg_matrix_rank"):
    case(2, target, fixed(matrices(4, 8)), 1e-9)
for target in operators("linalg_matrix_rank.tol_tensor"):
    case(2, target, fixed(matrices(4, 8)), torch.full((8,), 1e-9, dtype=torch.float64))
for target in operators("linalg_pinv.atol_rtol_tensor"):
    case(2, target, matrices(4, 8), atol=torch.full((8,), 1e-9, dtype=torch.float64))
case(0, aten.linalg_inv.default, matrices())
for target in operators(*DEFINITE.split()):
    case(2, target, symmetric(4, 8))
for target in operators("linalg_svd", "svd"):  # the gradient of singular vectors depends on their signs
    case(1, target, fixed(rand(8, 4, 3)))
for target in operators(
    "linalg_eig", "linalg_eigvals", "linalg_matrix_rank.atol_rtol_tensor", "linalg_matrix_rank.atol_rtol_float"
):
    case(2, target, fixed(matrices(4, 8)))
for target in operators("linalg_ldl_factor", "geqrf"):
    case(2, target, fixed(symmetric(4, 8)))
for target in operators("linalg_matrix_power", "matrix_power"):
    case(2, target, matrices(4, 8), 3)
    case(1, target, matrices(8), -2)
for target in operators("linalg_householder_product", "orgqr"):
    case(1, target, rand(8, 4, 3), rand(8, 3))

case(2, aten.linalg_solve.default, matrices(4, 8), rand(4, 8, 3, 2))
case(2, aten.linalg_solve.default, matrices(4, 8), rand(4, 8, 3))  # vectors
case(1, aten.linalg_solve.default, matrices(8), rand(3))
case(1, aten.linalg_solve.default, matrices(8), rand(1, 3, 2))
case(1, aten.linalg_solve.default, matrices(8), rand(8, 2, 3), left=False)
for target in operators("linalg_solve_ex"):
    case(2, target, matrices(4, 8), rand(4, 8, 3, 2))
case(2, aten.linalg_solve_triangular.default, matrices(4, 8), rand(4, 8, 3, 2), upper=True)
case(1, aten.linalg_solve_triangular.default, matrices(), rand(8, 3, 2), upper=False)
case(1, aten.cholesky_solve.default, rand(8, 3, 2), matrices(8))
_LU, _PIVOTS = torch.linalg.lu_factor(fixed(matrices(8)))
case(1, aten.linalg_lu_solve.default, _LU, _PIVOTS, rand(8, 3, 2))
