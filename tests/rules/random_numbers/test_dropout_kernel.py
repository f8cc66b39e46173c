"""The kernel of masks: its arithmetic in Triton's interpreter, bit for bit, and its code for GPUs that are not here."""

from __future__ import annotations

import os

import pytest
from forked_python import fresh
from paths import ROOT

pytest.importorskip("triton", reason="Triton has no package for this machine")

#: Slices of random tensors, drawn by the kernel and from the words of the host.
DRAWN = """
import random
import torch
from shardwright.rules.random_numbers import dropout_kernel
from shardwright.rules.random_numbers.counter_rng import Slice, host_words, key
from shardwright.rules.random_numbers.word_arithmetic import signed

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
    dropout_kernel.store_mask(out, rows, at.run, signed(start), signed(step), below)
    positions = torch.tensor(at.offsets())[:, None] + torch.arange(at.run)
    words = host_words(start, step, (positions.ravel() // 2).numpy(), 1).view(torch.int32)
    halves = words.gather(1, positions.view(-1, 1) % 2)
    assert torch.equal(out, (halves < below).view(size)), (size, whole, starts)
    dtype, scale = (torch.float32, torch.bfloat16, torch.float16)[turn % 3], 1 / random.uniform(0.3, 1)
    x = (torch.randn(size) * 10 ** random.uniform(-6, 3)).to(dtype)
    x.view(-1)[0] = float("inf") if turn % 7 == 0 else -0.0
    y, mask = dropout_kernel.drop(x, rows, at.run, signed(start), signed(step), below, scale)
    assert torch.equal(mask, out) and y.dtype == dtype
    wanted = x * mask * scale
    if dtype == torch.bfloat16:  # which the interpreter cuts off; a GPU rounds it (`cvt.rn` below)
        wanted = (x.float() * mask * scale).view(torch.int32).bitwise_and(-65536).view(torch.float32).bfloat16()
    bits = {4: torch.int32, 2: torch.int16}[x.element_size()]
    same = (y.view(bits) == wanted.view(bits)) | (y.isnan() & wanted.isnan())
    assert same.all(), (dtype, scale, y[~same], wanted[~same])
print("the same bits")
"""

#: The kernel's machine code for two generations of GPUs.
COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from shardwright.rules.random_numbers import dropout_kernel

whole = dict.fromkeys(("numel", "run", "first", "start", "step"), "i64") | {"below": "i32"}
for many, rows in ((True, "*i64"), (False, "*u8")):
    constants = {"MANY": many, "BLOCK": dropout_kernel.BLOCK}
    signature = {"out": "*u8", "rows": rows} | whole | dict.fromkeys(constants, "constexpr")
    sources = {"mask": ASTSource(dropout_kernel._compiled, signature, constants)}
    for dtype in ("fp32", "bf16", "fp16"):
        signature = {"x": f"*{dtype}", "y": f"*{dtype}", "out": "*u8", "rows": rows} | whole | {"scale": "fp32"}
        signature |= dict.fromkeys(constants, "constexpr")
        sources[dtype] = ASTSource(dropout_kernel._compiled_drop, signature, constants)
    for name, source in sources.items():
        for generation in (80, 90):
            made = compile(source, target=GPUTarget("cuda", generation, 32))
            assert made.asm["ptx"].count("st.global") >= (1 if name == "mask" else 2) and made.asm["cubin"]
            assert {"bf16": "cvt.rn.bf16", "fp16": "cvt.rn.f16"}.get(name, "") in made.asm["ptx"]
print("compiled")
"""


def ended(script: str, **environment: str) -> str:
    """The output of a script in a process of its own."""
    made = fresh(script, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment, timeout=300)
    assert made.returncode == 0, made.stderr[-3000:]
    return made.stdout.strip()


def test_the_kernel_has_the_bits_of_the_words() -> None:
    assert ended(DRAWN, TRITON_INTERPRET="1") == "the same bits"


def test_the_kernel_compiles_for_gpus() -> None:
    assert ended(COMPILED) == "compiled"
