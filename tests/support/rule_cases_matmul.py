"""Products: concrete calls, see `rule_cases`."""

import torch
from rule_cases import rand
from rule_reference import collected

aten = torch.ops.aten
CASES, case = collected()

case(1, aten.matmul.default, rand(4), rand(4))
case(2, aten.matmul.default, rand(4), rand(4, 8))
case(2, aten.matmul.default, rand(4, 8), rand(8))
case(3, aten.matmul.default, rand(4, 8), rand(8, 2))
case(3, aten.matmul.default, rand(8), rand(4, 8, 2))
case(3, aten.matmul.default, rand(2, 4, 8), rand(8))
case(4, aten.matmul.default, rand(2, 4, 8), rand(8, 4))
case(4, aten.matmul.default, rand(4, 8), rand(2, 8, 4))
case(4, aten.matmul.default, rand(2, 4, 4), rand(2, 4, 8))
case(5, aten.matmul.default, rand(2, 1, 2, 4), rand(4, 4, 2))
case(4, aten.matmul.default, rand(1, 2, 4), rand(4, 4, 2))
case(3, aten.matmul.default, *[rand(4, 4)] * 2)
case(3, aten.mm.default, rand(4, 8), rand(8, 4))
case(4, aten.bmm.default, rand(2, 4, 8), rand(2, 8, 4))
# whole numbers of float8, whose sums are whole numbers of float32
FLOAT8 = [torch.randint(-4, 4, shape).to(torch.float8_e4m3fn) for shape in ((8, 16), (4, 16))]
FLOAT8[1] = FLOAT8[1].t()
case(3, aten._scaled_mm.default, *FLOAT8, torch.tensor(0.5), torch.tensor([2.0]), out_dtype=torch.float32)
if torch.__version__ >= "2.10":  # on CPUs torch 2.9 has one scale a matrix alone
    case(3, aten._scaled_mm.default, *FLOAT8, torch.full((8, 1), 0.5), torch.full((1, 4), 2.0), out_dtype=torch.float32)
case(
    2,
    aten._scaled_mm.default,
    *FLOAT8,
    torch.ones(1, 1),
    torch.ones(()),
    torch.ones(4).bfloat16(),
    out_dtype=torch.bfloat16,
)
case(2, aten.mv.default, rand(4, 8), rand(8))
case(1, aten.dot.default, rand(8), rand(8))
case(1, aten.vdot.default, rand(8), rand(8))
case(2, aten.outer.default, rand(4), rand(8))
case(2, aten.ger.default, rand(4), rand(8))
case(3, aten.inner.default, rand(4, 8), rand(2, 8))
case(2, aten.inner.default, rand(4, 8), rand())
case(4, aten.tensordot.default, rand(4, 2, 8), rand(8, 4), [2], [0])
case(3, aten.tensordot.default, rand(4, 2, 8), rand(8, 4), [0, -1], [1, 0])
case(4, aten.linalg_multi_dot.default, [rand(4, 8), rand(8, 2), rand(2, 4)])
case(2, aten.linalg_multi_dot.default, [rand(4), rand(4, 8), rand(8)])
case(3, aten.chain_matmul.default, [rand(4, 8), rand(8, 2)])
case(4, aten.kron.default, rand(4, 2), rand(2, 4))
case(2, aten.kron.default, rand(4), rand(1, 8))
case(3, aten.linear.default, rand(4, 8), rand(4, 8))
case(4, aten.linear.default, rand(2, 4, 8), rand(4, 8), rand(4))
case(2, aten.linear.default, rand(8), rand(4, 8), rand(4))
case(2, aten.linear.default, rand(4, 8), rand(4, 8), rand(4, 4))
case(2, aten.linear.default, rand(4, 8), rand(8))
case(4, aten.bilinear.default, rand(4, 2), rand(4, 4), rand(8, 2, 4), rand(8))
case(4, aten.bilinear.default, rand(4, 2), rand(4, 4), rand(8, 2, 4))
for added in (rand(4, 8), rand(8), rand(4, 1), rand(1), rand()):
    case(3, aten.addmm.default, added, rand(4, 4), rand(4, 8))
case(3, aten.addmm.default, rand(8), rand(4, 4), rand(4, 8), beta=0.5, alpha=2)
case(3, aten.addmm.default, rand(4, 8), rand(4, 4), rand(4, 8), beta=0)
case(4, aten.baddbmm.default, rand(2, 4, 8), rand(2, 4, 4), rand(2, 4, 8), alpha=3)
case(4, aten.baddbmm.default, rand(1, 1, 8), rand(2, 4, 4), rand(2, 4, 8))
case(2, aten.addmv.default, rand(4), rand(4, 8), rand(8), beta=2)
case(2, aten.addr.default, rand(4, 8), rand(4), rand(8), beta=2)
case(4, aten.addbmm.default, rand(4, 8), rand(2, 4, 4), rand(2, 4, 8), alpha=2)
for equation, splittable, operands in [
    ("km,kn->mn", 3, [rand(8, 4), rand(8, 2)]),
    ("bhqd,bhkd->bhqk", 5, [rand(2, 2, 4, 2), rand(2, 2, 2, 2)]),
    ("...k,nk->...n", 4, [rand(2, 4, 8), rand(2, 8)]),
    ("...ij,...jk", 4, [rand(2, 2, 4), rand(1, 4, 2)]),
    ("b...,b...->b...", 3, [rand(2, 4, 4), rand(2, 4)]),
    ("...ij->...i", 3, [rand(2, 4, 4)]),
    ("...ij->ij", 3, [rand(2, 4, 4)]),
    ("ij,jk,kl->il", 4, [rand(2, 4), rand(4, 2), rand(2, 4)]),
    ("ij,k->i", 3, [rand(4, 2), rand(4)]),
    ("bii->b", 1, [rand(4, 2, 2)]),
    ("bii,bj->bij", 2, [rand(4, 2, 2), rand(4, 2)]),
    ("i,j", 2, [rand(4), rand(8)]),
    ("ij->", 2, [rand(4, 8)]),
    ("Ab,bC", 3, [rand(4, 2), rand(2, 4)]),
    ("ij,jk->ik", 3, [rand(4, 1), rand(8, 4)]),
]:
    case(splittable, aten.einsum.default, equation, operands)
