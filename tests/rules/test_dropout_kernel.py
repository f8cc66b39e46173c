"""The kernel of masks: its arithmetic in Triton's interpreter, bit for bit, and its code for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from paths import ROOT

pytest.importorskip("triton", reason="Triton has no package for this machine")

#: Slices of random tensors, drawn by the kernel and from the words of the host.
DRAWN = """
import random
import torch
from shardwright.rules import dropout_kernel
from shardwright.rules.counter_rng import Slice, _signed, host_words, key

random.seed(0)
for turn in range(40):
    size = [random.randint(1, 9) for _ in range(random.randint(1, 3))]
    whole = [s * random.randint(1, 3) + random.randint(0, 2) for s in size]
    micro = [0, 3, 1] if turn % 4 == 0 else []
    starts = [random.randint(0, w - s) for s, w in zip(size, whole)]
    start, step = key(random.getrandbits(64), turn, 3)
    at = Slice([torch.tensor(s) for s in starts], range(len(size)), size, whole, micro, turn % 3 if micro else 0)
    below = -(1 << 31) + 1 if turn % 5 == 0 else round(random.random() * 2**32) - (1 << 31)
    out = torch.zeros(size, dtype=torch.bool)
    rows = at.offsets_on(torch.device("cpu")) if at.rows else at.first
    dropout_kernel.store_mask(out, rows, at.run, _signed(start), _signed(step), below)
    positions = torch.tensor(at.offsets())[:, None] + torch.arange(at.run)
    words = host_words(start, step, (positions.ravel() // 2).numpy(), 1).view(torch.int32)
    halves = words.gather(1, positions.view(-1, 1) % 2)
    assert torch.equal(out, (halves < below).view(size)), (size, whole, starts)
print("the same bits")
"""

#: The kernel's machine code for two generations of GPUs.
COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from shardwright.rules import dropout_kernel

whole = dict.fromkeys(("numel", "run", "first", "start", "step"), "i64") | {"below": "i32"}
for many, rows in ((True, "*i64"), (False, "*u8")):
    signature = {"out": "*u8", "rows": rows} | whole | {"MANY": "constexpr", "BLOCK": "constexpr"}
    source = ASTSource(dropout_kernel._compiled, signature, {"MANY": many, "BLOCK": dropout_kernel.BLOCK})
    for generation in (80, 90):
        made = compile(source, target=GPUTarget("cuda", generation, 32))
        assert made.asm["ptx"].count("st.global") >= 1 and made.asm["cubin"]
print("compiled")
"""


def ended(script: str, **environment: str) -> str:
    """The output of a script in a process of its own."""
    made = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return made.stdout.strip()


def test_the_kernel_has_the_bits_of_the_words() -> None:
    assert ended(DRAWN, TRITON_INTERPRET="1") == "the same bits"


def test_the_kernel_compiles_for_gpus() -> None:
    assert ended(COMPILED) == "compiled"
