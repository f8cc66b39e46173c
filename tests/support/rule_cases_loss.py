"""Losses: concrete calls, see `rule_cases`."""

import torch
from rule_cases import fixed, integers, positive, rand
from rule_reference import collected

aten = torch.ops.aten
CASES, case = collected()

NONE, MEAN, SUM = 0, 1, 2
for reduction in (NONE, MEAN, SUM):
    for name in ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"]:
        case(2, getattr(aten, name).default, rand(4, 8), fixed(rand(4, 8)), reduction)
    case(2, aten.binary_cross_entropy.default, positive(4, 8), fixed(positive(4, 8)), None, reduction)
    case(
        2,
        aten.binary_cross_entropy_with_logits.default,
        rand(4, 8),
        fixed(positive(4, 8)),
        fixed(positive(8)),
        fixed(positive(8)),
        reduction,
    )
    case(2, aten.poisson_nll_loss.default, rand(4, 8), fixed(positive(4, 8)), True, False, 1e-8, reduction)
    case(2, aten.hinge_embedding_loss.default, rand(4, 8), fixed(rand(4, 8).sign()), 1.0, reduction)
    case(2, aten.margin_ranking_loss.default, rand(4, 8), rand(4, 8), fixed(rand(8).sign()), 0.1, reduction)
    case(1, aten.triplet_margin_loss.default, rand(8, 3), rand(8, 3), rand(8, 3), 1.0, 2.0, 1e-6, False, reduction)
    case(1, aten.cosine_embedding_loss.default, rand(8, 3), rand(8, 3), fixed(rand(8).sign()), 0.1, reduction)
    case(1, aten.multi_margin_loss.default, rand(8, 3), integers(3, 8), 1, 1.0, fixed(positive(3)), reduction)
    case(1, aten.multilabel_margin_loss.default, rand(8, 3), integers(3, 8, 3), reduction)
    weight, ignored = fixed(positive(4)), torch.tensor([3, -1, 0, -1, 2, 1, -1, 3])
    case(2, aten.cross_entropy_loss.default, rand(8, 4), integers(4, 8), None, reduction)
    case(2, aten.cross_entropy_loss.default, rand(8, 4), ignored, weight, reduction, -1, 0.1)
    case(2, aten.cross_entropy_loss.default, rand(8, 4), positive(8, 4), weight, reduction, -100, 0.1)
    case(3, aten.cross_entropy_loss.default, rand(8, 4, 2), fixed(positive(8, 4, 2)), None, reduction)
    case(1, aten.cross_entropy_loss.default, rand(4), torch.tensor(2), weight, reduction, -100, 0.1)
    case(1, aten.cross_entropy_loss.default, rand(4), fixed(positive(4)), weight, reduction)
    case(2, aten.nll_loss_nd.default, rand(8, 4), integers(4, 8), weight, reduction, 3)
    case(2, aten.nll_loss.default, rand(8, 4), integers(4, 8), weight, reduction)
    case(int(reduction == SUM), aten.nll_loss_forward.default, rand(8, 4), integers(4, 8), weight, reduction, 2)
for more in ((weight, MEAN, 2), (None, MEAN, 2, 0.2), (weight, MEAN, -100, 0.1), (None, MEAN, -1)):
    case(2, aten.cross_entropy_loss.default, rand(8, 4), ignored if more[2] == -1 else integers(4, 8), *more)
case(4, aten.cross_entropy_loss.default, rand(2, 4, 4, 2), integers(4, 2, 4, 2), weight, MEAN, 1, 0.1)
case(3, aten.cross_entropy_loss.default, rand(2, 8, 4), integers(8, 2, 4), None, NONE)
case(2, aten.cross_entropy_loss.default, rand(8, 5), integers(5, 8), None, MEAN)  # classes that do not divide
case(2, aten.cross_entropy_loss.default, rand(8, 4), torch.full((8,), -100), None, MEAN)
case(2, aten.cross_entropy_loss.default, (fixed(rand(8, 4)) + 1000).requires_grad_(), integers(4, 8), None, MEAN)
case(3, aten.cross_entropy_loss.default, rand(4, 4, 2), positive(4, 4, 2), weight, MEAN)
case(1, aten.cross_entropy_loss.default, rand(4), torch.tensor(2), None, MEAN)
case(3, aten.nll_loss_nd.default, rand(4, 4, 2), integers(4, 4, 2), None, MEAN)
case(4, aten.nll_loss2d.default, rand(2, 4, 4, 2), integers(4, 2, 4, 2), weight, MEAN, 1)
case(2, aten.mse_loss.default, rand(4, 8), rand(4, 8))
case(2, aten.mse_loss.default, rand(4, 8), fixed(rand(4, 1)), MEAN)
case(2, aten.cross_entropy_loss.default, rand(8, 4), integers(4, 8), weight=fixed(positive(4)))
case(2, aten.take.default, rand(4, 8), integers(32, 4, 2))

_LABELS, _STEPS, _COUNTS = integers(4, 8, 3) + 1, torch.full((8,), 6), torch.tensor([3, 2, 1, 3, 2, 1, 3, 3])
for zero_infinity in (False, True):
    case(
        1,
        torch.ops.shardwright.ctc_loss.default,
        fixed(rand(6, 8, 5)).log_softmax(2).requires_grad_(),
        _LABELS,
        _STEPS,
        _COUNTS,
        0,
        zero_infinity,
    )
