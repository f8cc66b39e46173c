"""Every rule against the operator itself: run slice by slice on four devices, forward and backward, it must give what
it gives whole. Each factor is cut in four, and in two with replicas; each two factors are cut together."""

import importlib

import pytest
import torch
from paths import SUPPORT
from rule_reference import Case, Whole, assignments, check, close, outputs_of

from shardwright.rules import assignment_of, bound_rule, find_rule
from shardwright.rules.registry import _RULES

CASES: list[Case] = [
    c for path in sorted(SUPPORT.glob("rule_cases*.py")) for c in importlib.import_module(path.stem).CASES
]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_whole_and_sliced_agree(case: Case) -> None:
    whole = Whole(case)
    bound = bound_rule(whole.op)
    assert sum(f.splittable and f.size > 1 for f in bound.factors) == case.splittable, bound.notation.text
    cut = check(case, 4)
    assert cut or not case.splittable


def test_linear_rules_are_linear() -> None:
    """An operator that lets open sums pass gives the sum of its results for the terms."""
    generator = torch.Generator().manual_seed(3)
    checked = 0
    for case in CASES:
        op = Whole(case).op
        if not find_rule(op).is_linear(op) or not case.values_matter:
            continue
        tensors: list[torch.Tensor] = []
        Whole.exchange((case.args, case.kwargs), tensors.append)
        one, other = (
            {id(t): torch.randint(-8, 9, t.shape, generator=generator).to(t.dtype) for t in tensors} for _ in range(2)
        )
        outputs = []
        for values in ({key: one[key] + other[key] for key in one}, one, other):
            args, kwargs = Whole.exchange((case.args, case.kwargs), lambda t: values[id(t)])
            outputs.append(outputs_of(case.target(*args, **kwargs)))
        assert all(close(a, b + c) for a, b, c in zip(*outputs)), case.id
        checked += 1
    assert checked > 100


def test_an_assignment_is_found_again_from_its_layouts_and_cuts() -> None:
    """Whichever way it is said, an assignment of the factors that inputs carry is the same assignment."""
    for case in CASES:
        bound = bound_rule(Whole(case).op)
        carried = {f for dims in bound.inputs for dim in dims for f in dim}
        for assignment in assignments(bound, 4):
            if not bound.inputs or any(d and f not in carried for f, d in enumerate(assignment.digits)):
                continue
            layouts = tuple(bound.input_layout(i, assignment) for i in range(len(bound.inputs)))
            assert bound.follow(dict(enumerate(layouts))) == assignment, case.id
            assert assignment_of(bound, layouts, 4) == assignment, case.id
            cuts = bound.in_strategy(assignment)
            assert bound.in_strategy(assignment_of(bound, cuts, 4)) == cuts, case.id


def test_every_rule_has_a_case() -> None:
    ours = {str(key) for key in _RULES if getattr(key, "namespace", None) == "aten"}  # not what other tests describe
    missing = ours - {str(c.target) for c in CASES}
    assert not missing, f"no case in tests/support/rule_cases*.py for {sorted(missing)}"
