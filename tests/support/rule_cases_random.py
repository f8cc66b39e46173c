"""Random operators: concrete calls, see `rule_cases`. Whole they are what one device draws for the same seed."""

import torch
from rule_cases import booleans, fixed, integers, positive, rand
from rule_reference import collected

aten = torch.ops.aten
CASES, case = collected()

for drop in (aten.dropout.default, aten.alpha_dropout.default):
    case(2, drop, rand(4, 8), 0.3, True)
    case(2, drop, rand(4, 8), 0.3, False)
    case(2, drop, rand(4, 8), 1.0, True)
    case(3, drop, rand(4, 2, 8), 0.0, True)
case(1, aten.dropout.default, rand(8), 0.5, True)
case(0, aten.dropout.default, rand(), 0.5, True)
case(3, aten.dropout.default, rand(4, 3, 4), 0.5, True)  # rows that begin in either half of a word
case(2, aten.dropout.default, rand(4, 12), 0.5, True)  # slices that do
case(2, aten.native_dropout.default, rand(4, 8), 0.3, True)
case(2, aten.native_dropout.default, rand(4, 8), 0.3, None)
case(2, aten.native_dropout.default, rand(4, 8), 0.3, False)
for drop in (aten.feature_dropout.default, aten.feature_alpha_dropout.default):
    case(2, drop, rand(4, 8), 0.3, True)
    case(4, drop, rand(4, 2, 4, 8), 0.3, True)
    case(4, drop, rand(4, 2, 4, 8), 0.3, False)
case(2, aten.rrelu.default, rand(4, 8), 0.1, 0.4, True)
case(2, aten.rrelu.default, rand(4, 8), 0.1, 0.4, False)

F64 = {"dtype": torch.float64}
case(2, aten.rand.default, [4, 8], **F64)
case(2, aten.randn.default, [4, 8], **F64)
case(2, aten.normal.float_float, 1.0, 2.0, [4, 8], **F64)
case(2, aten.randint.default, 10, [4, 8])
case(2, aten.randint.low, -5, 10, [4, 8], dtype=torch.int32)
case(0, aten.rand.default, [], **F64)
case(0, aten.randperm.default, 12)
case(2, aten.rand_like.default, rand(4, 8))
case(2, aten.randn_like.default, rand(4, 8))
case(2, aten.randint_like.default, rand(4, 8), 10)
case(2, aten.randint_like.low_dtype, rand(4, 8), -3, 10)
case(2, aten.randint_like.Tensor, rand(4, 8), torch.tensor(9))
case(2, aten.uniform.default, rand(4, 8), -1.0, 3.0)
case(2, aten.uniform.default, rand(4, 8))
case(2, aten.normal_functional.default, rand(4, 8), 1.0, 2.0)
case(2, aten.normal.Tensor_float, rand(4, 8), 2.0)
case(2, aten.normal.float_Tensor, 1.0, positive(4, 8))
case(2, aten.normal.Tensor_Tensor, rand(4, 8), positive(8))
case(2, aten.bernoulli.default, positive(4, 8))
case(2, aten.bernoulli.p, rand(4, 8), 0.3)
case(2, aten.bernoulli.p, integers(2, 4, 8), 0.3)
case(2, aten.bernoulli.Tensor, rand(4, 8), positive(8))
case(2, aten.exponential.default, rand(4, 8))
case(2, aten.exponential.default, rand(4, 8), 2.0)
case(2, aten.geometric.default, rand(4, 8), 0.2)
case(2, aten.cauchy.default, rand(4, 8), 1.0, 2.0)
case(2, aten.log_normal.default, rand(4, 8), 0.5, 0.3)
case(2, aten.random.default, fixed(rand(4, 8)))
case(2, aten.random.default, integers(2, 4, 8))
case(2, aten.random.default, booleans(4, 8))
case(2, aten.random.to, rand(4, 8), 10)
case(1, aten.multinomial.default, positive(8, 5), 3)
case(1, aten.multinomial.default, positive(8, 5), 7, True)
case(0, aten.multinomial.default, positive(5), 3)

sdpa = aten.scaled_dot_product_attention.default
for more in ({}, {"is_causal": True}):
    case(6, sdpa, rand(2, 4, 4, 8), rand(2, 4, 8, 8), rand(2, 4, 8, 2), None, 0.3, **more)
case(7, sdpa, rand(2, 4, 4, 8), rand(2, 2, 4, 8), rand(2, 2, 4, 2), None, 0.3, enable_gqa=True)
