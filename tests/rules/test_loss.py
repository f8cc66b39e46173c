"""Every loss of `torch.nn`, in all its forms, on four devices beside one; a loss that torch adds fails here until the
table has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_device import assert_as_one_device
from small_networks import D, draw, labels
from torch import Tensor, nn

import shardwright as sw

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, CLASSES = 8, 8
REDUCTIONS = ("none", "mean", "sum")

#: Links that cost nothing: a search cuts whatever can be cut.
FREE = sw.Cluster.of("h100x8", 4).with_free_links()
MODES: dict[str, dict[str, Any]] = {
    "semi_auto": {"dataset": "data_parallel"},
    "sharding_propagation": {"cluster": FREE},
    "dynamic_programming": {"cluster": FREE},
}


def between(*shape: int, seed: int) -> Tensor:
    """Numbers in [0.1, 0.9]."""
    return 0.1 + 0.8 * torch.rand(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, seed: int = 7) -> Tensor:
    return torch.randint(0, CLASSES, shape, generator=torch.Generator().manual_seed(seed))


def sets_of_classes() -> Tensor:
    """For each row one to four different classes, then -1."""
    made = torch.full((ROWS, CLASSES), -1)
    for row in range(ROWS):
        count = 1 + row % 4
        made[row, :count] = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(row))[:count]
    return made


#: Further inputs of the losses, by name.
GIVEN = {
    "numbers": draw(ROWS, CLASSES, seed=2),
    "others": draw(ROWS, CLASSES, seed=3),
    "column": draw(ROWS, 1, seed=4),
    "shares": between(ROWS, CLASSES, seed=5),
    "share": between(ROWS, seed=6),
    "distribution": draw(ROWS, CLASSES, seed=8).softmax(1),
    "signs": draw(ROWS, CLASSES, seed=9).sign(),
    "sign": draw(ROWS, seed=10).sign(),
    "class": labels(ROWS, CLASSES),
    "sets": sets_of_classes(),
    "places": classes(ROWS, 4),
    "distributions": draw(ROWS, CLASSES, 4, seed=11).softmax(1),
    "plane": classes(ROWS, 2, 2),
    "labels": 1 + labels(2 * ROWS, CLASSES - 1).view(ROWS, 2),
    "steps": torch.tensor([5, 4, 5, 5, 3, 5, 4, 5]),
    "few steps": torch.tensor([5, 1, 5, 1, 3, 5, 4, 5]),
    "counts": torch.tensor([2, 1, 2, 2, 1, 2, 0, 2]),
    "one class": torch.tensor(3),
    "one set": torch.tensor([1, 3, -1, 0, 0, 0, 0, 0]),
}
WEIGHT = between(CLASSES, seed=12) + 0.5


@dataclass(frozen=True)
class Case:
    """A loss with one kind of inputs.

    Attributes:
        name: of the class; a version of torch that lacks the class has no such case.
        given: the names of further inputs.
        forms: the arguments of each form.
        prepare: scores -> the first input.
        reductions: each form is made with each of these; None: the form alone.
    """

    name: str
    given: tuple[str, ...]
    forms: tuple[dict[str, Any], ...] = ({},)
    prepare: Callable[[Tensor], Tensor] = lambda y: y
    reductions: tuple[str, ...] | None = REDUCTIONS

    def losses(self) -> Iterator[tuple[str, nn.Module]]:
        for form in self.forms:
            for reduction in self.reductions or (None,):
                torch.manual_seed(0)
                made = getattr(nn, self.name)(**form, **({} if reduction is None else {"reduction": reduction}))
                yield f"{self.name} {' '.join((*form, reduction or '', *self.given))}", made


def log_softmax(y: Tensor) -> Tensor:
    return F.log_softmax(y, -1)


def log_softmax_of_planes(y: Tensor) -> Tensor:
    return F.log_softmax(y.permute(0, 3, 1, 2).contiguous(), 1)


def steps_first(y: Tensor) -> Tensor:
    return F.log_softmax(y, -1).transpose(0, 1)


def classes_second(y: Tensor) -> Tensor:
    return y.transpose(1, 2)


ONE_BY_CLASS = ({}, {"weight": WEIGHT, "ignore_index": 3})
SMOOTHED = {"weight": WEIGHT, "label_smoothing": 0.1}
OF_CLASSES = (*ONE_BY_CLASS, {"label_smoothing": 0.1}, {**SMOOTHED, "ignore_index": 3})
VOCABULARY = {"in_features": CLASSES, "num_classes": 2 * CLASSES, "dtype": D}

#: Shape of the scores -> the losses of one model.
FAMILIES: dict[str, tuple[tuple[int, ...], list[Case]]] = {
    "elements": (
        (ROWS, CLASSES),
        [
            Case("L1Loss", ("numbers",)),
            Case("MSELoss", ("numbers",)),
            Case("MSELoss", ("column",)),
            Case("MSELoss", ("others",), ({"size_average": False}, {"reduce": False}), reductions=None),
            Case("SmoothL1Loss", ("numbers",), ({}, {"beta": 0.3}, {"beta": 0.0})),
            Case("HuberLoss", ("numbers",), ({"delta": 0.7},)),
            Case("PoissonNLLLoss", ("shares",), ({}, {"full": True})),
            Case("PoissonNLLLoss", ("shares",), ({"log_input": False},), torch.sigmoid),
            Case("GaussianNLLLoss", ("numbers", "shares"), ({}, {"full": True})),
            Case("GaussianNLLLoss", ("numbers", "share")),
        ],
    ),
    "probabilities": (
        (ROWS, CLASSES),
        [
            Case("KLDivLoss", ("distribution",), ({},), log_softmax, (*REDUCTIONS, "batchmean")),
            Case("KLDivLoss", ("numbers",), ({"log_target": True},), log_softmax, (*REDUCTIONS, "batchmean")),
            Case("BCELoss", ("shares",), ({}, {"weight": WEIGHT}), torch.sigmoid),
            Case(
                "BCEWithLogitsLoss",
                ("shares",),
                ({}, {"weight": WEIGHT}, {"pos_weight": WEIGHT}, {"weight": WEIGHT, "pos_weight": WEIGHT}),
            ),
            Case("HingeEmbeddingLoss", ("signs",), ({}, {"margin": 0.3})),
            Case("SoftMarginLoss", ("signs",)),
            Case("MarginRankingLoss", ("numbers", "signs"), ({}, {"margin": 0.3})),
        ],
    ),
    "rows": (
        (ROWS, CLASSES),
        [
            Case("MultiLabelMarginLoss", ("sets",)),
            Case("MultiLabelSoftMarginLoss", ("shares",), ({}, {"weight": WEIGHT})),
            Case("MultiMarginLoss", ("class",), ({}, {"p": 2, "margin": 0.5, "weight": WEIGHT})),
            Case("CosineEmbeddingLoss", ("numbers", "sign"), ({}, {"margin": 0.3})),
            Case("TripletMarginLoss", ("numbers", "others"), ({}, {"p": 1, "swap": True, "margin": 0.4})),
            Case(
                "TripletMarginWithDistanceLoss",
                ("numbers", "others"),
                ({}, {"distance_function": nn.PairwiseDistance(p=1.0), "swap": True, "margin": 0.4}),
            ),
        ],
    ),
    "classes": (
        (ROWS, CLASSES),
        [
            Case("CrossEntropyLoss", ("class",), OF_CLASSES),
            Case("CrossEntropyLoss", ("distribution",), ({}, {"weight": WEIGHT}, SMOOTHED)),
            Case("NLLLoss", ("class",), (*ONE_BY_CLASS, {"weight": WEIGHT}), log_softmax),
            Case("LinearCrossEntropyLoss", ("class",), (VOCABULARY, {**VOCABULARY, "bias": True})),
            Case(
                "AdaptiveLogSoftmaxWithLoss",
                ("class",),
                reductions=None,
                forms=(
                    {"in_features": CLASSES, "n_classes": CLASSES, "cutoffs": [2, 5], "div_value": 2.0, "dtype": D},
                ),
            ),
        ],
    ),
    "places": (
        (ROWS, 4, CLASSES),
        [
            Case("CrossEntropyLoss", ("places",), ONE_BY_CLASS, classes_second),
            Case("CrossEntropyLoss", ("distributions",), ({}, SMOOTHED), classes_second),
            Case("NLLLoss", ("places",), ONE_BY_CLASS, lambda y: log_softmax(y).transpose(1, 2)),
        ],
    ),
    "planes": (
        (ROWS, 2, 2, CLASSES),
        [
            Case("NLLLoss", ("plane",), ({"weight": WEIGHT},), log_softmax_of_planes),
            Case("NLLLoss2d", ("plane",), ({"ignore_index": 3},), log_softmax_of_planes),
            Case("CrossEntropyLoss", ("plane",), ({"label_smoothing": 0.1},), lambda y: y.permute(0, 3, 1, 2)),
        ],
    ),
    "steps": (
        (ROWS, 5, CLASSES),
        [
            Case("CTCLoss", ("labels", "steps", "counts"), prepare=steps_first),
            Case("CTCLoss", ("labels", "few steps", "counts"), ({"zero_infinity": True, "blank": 0},), steps_first),
        ],
    ),
    "one row": (
        (CLASSES,),
        [
            Case("CrossEntropyLoss", ("one class",), (SMOOTHED,)),
            Case("NLLLoss", ("one class",), prepare=log_softmax),
            Case("MultiMarginLoss", ("one class",)),
            Case("MultiLabelMarginLoss", ("one set",)),
        ],
    ),
}


class Losses(nn.Module):
    """The losses of one family, of one product."""

    def __init__(self, cases: list[Case], marked: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(0.5 * draw(CLASSES, CLASSES, seed=1))
        self.product = sw.shard(torch.matmul, ((2, 1), (1, 2))) if marked else torch.matmul
        made = [(case, *loss) for case in cases if hasattr(nn, case.name) for loss in case.losses()]
        self.calls = [(name, case.prepare, case.given) for case, name, _ in made]
        self.losses = nn.ModuleList(loss for *_, loss in made)

    def forward(self, x: Tensor, given: dict[str, Tensor]) -> dict[str, Any]:
        y = self.product(x, self.w)
        return {
            name: loss(prepare(y), *(given[n] for n in names))
            for (name, prepare, names), loss in zip(self.calls, self.losses)
        }


def losses_of_torch() -> set[str]:
    """The names of the losses in `torch.nn`."""
    modules = ("torch.nn.modules.loss", "torch.nn.modules.adaptive")
    return {name for name, kind in vars(nn).items() if isinstance(kind, type) and kind.__module__ in modules}


def test_every_loss_of_torch_is_in_the_table() -> None:
    tested = {case.name for _, cases in FAMILIES.values() for case in cases}
    missing = losses_of_torch() - tested
    assert not missing, f"a case for {sorted(missing)}, and a rule in shardwright/rules/loss.py if there is none"


@pytest.mark.parametrize(
    ("family", "mode"), [(f, m) for f in FAMILIES for m in MODES if f != "one row" or m == "dynamic_programming"]
)
def test_losses_are_as_on_one_device(family: str, mode: str) -> None:
    shape, cases = FAMILIES[family]
    net = Losses(cases, mode == "sharding_propagation" and len(shape) == 2)
    given = {name: GIVEN[name] for case in cases for name in case.given}
    model = assert_as_one_device(
        net,
        *((draw(*shape, seed=20 + i), given) for i in range(3)),
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        devices=4,
        mode=mode,
        **MODES[mode],
    )
    assert all(p.isfinite().all() for p in net.parameters())
    cut = [bool(d.assignment.used) for d in model.plan.decisions.values()]
    assert len(shape) == 1 or sum(cut) > 0.8 * len(cut)


@pytest.mark.parametrize("family", ["probabilities", "rows", "classes"])
def test_losses_that_are_not_cut_are_as_without_the_wrapper(family: str) -> None:
    """Nothing is cut on one device: each loss is called as the forward calls it, with the defaults of its operator."""
    shape, cases = FAMILIES[family]
    given = {name: GIVEN[name] for case in cases for name in case.given}
    assert_as_one_device(Losses(cases, False), (draw(*shape, seed=20), given), devices=1)
