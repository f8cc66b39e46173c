"""Shapes and dtypes of results, for calls on values of a graph; `capture/test_outlines` has the formulas beside the
kernels."""

import pytest
import torch

from shardwright.graph import Value
from shardwright.rules import result_shapes
from shardwright.rules.result_shapes import Result, result_by_formula, results_of

aten = torch.ops.aten
F, L = torch.float32, torch.int64

X, W, ROWS = Value("x", (4, 6, 8), F), Value("w", (3, 8), F), Value("i", (4, 6), L)
CALLS = [
    (aten.linear.default, (X, W), {}, [Result((4, 6, 3), F)]),
    (aten.add.Tensor, (X, Value("y", (6, 1), F)), {"alpha": 2}, [Result((4, 6, 8), F)]),
    (aten.embedding.default, (W, ROWS), {}, [Result((4, 6, 8), F)]),
    (aten.split.Tensor, (X, 4, -1), {}, [Result((4, 6, 4), F)] * 2),
    (aten.cat.default, ([X, X], 1), {}, [Result((4, 12, 8), F)]),
    (aten.max.dim, (X, 0), {}, [Result((6, 8), F), Result((6, 8), L)]),
    (aten.softmax.int, (X, -1, torch.float64), {}, [Result((4, 6, 8), torch.float64)]),
]


@pytest.mark.parametrize("target, args, kwargs, wanted", CALLS, ids=[str(target) for target, *_ in CALLS])
def test_results_of_calls(target, args, kwargs, wanted):
    assert list(results_of(target, args, kwargs)) == wanted


def test_a_call_is_found_once(monkeypatch):
    calls, plain = [], result_shapes._computed
    monkeypatch.setattr(result_shapes, "_computed", lambda *call: calls.append(call) or plain(*call))
    for name in ("a", "b"):
        x = Value(name, (7, 11, 13), F)
        assert results_of(aten.relu.default, (x,), {}) == (Result((7, 11, 13), F),)
    results_of(aten.relu.default, (Value("a", (7, 11, 13), torch.float64),), {})
    assert len(calls) == 2


def test_kernels_refuse_what_no_formula_tells():
    assert result_by_formula(aten.mm.default, [(4, 3), (4, 3)], [F, F], (), {}) is None
    with pytest.raises(RuntimeError, match="dim|mat1|size|shape"):
        results_of(aten.mm.default, (Value("a", (4, 3), F), Value("b", (4, 3), F)), {})
