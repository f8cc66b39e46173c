"""Clusters that are known by name: nodes of eight devices, as many as one likes, and the processor of a laptop.

Rates are those of the makers' data sheets, dense (without sparsity), and of one direction of a link. What a program
reaches is less; `shardwright calibrate` measures it. Each figure has its source and the source's address; what has none
is marked "assumed", with why it is of that size.
"""

from __future__ import annotations

import re
from dataclasses import replace

from .cluster import Cluster, Level
from .errors import SettingError

__all__ = ["PRESETS", "preset"]

#: Seconds to launch one operator on an accelerator. Assumed: a little above the 3.8 µs from one short kernel to the
#: next, where each is launched by itself, of NVIDIA, "Getting Started with CUDA Graphs" (2019),
#: https://developer.nvidia.com/blog/cuda-graphs/ ; what PyTorch does for an operator comes on top.
_LAUNCH = 5e-6

# Seconds from device to device: NCCL's own figures for a ring with the protocol LL128 (hwLat, in µs: NVLink 1.9, PCI
# Express 2.5, through the network 4.0),
# https://github.com/NVIDIA/nccl/blob/01afd20a77b5804e0ecf1042509dd9d20ebf9e93/src/graph/tuning.cc
_NVLINK, _PCI, _NETWORK = 1.9e-6, 2.5e-6, 4.0e-6

# NVIDIA, "H100 Tensor Core GPU", specifications (SXM), https://www.nvidia.com/en-us/data-center/h100/ : 80 GB at 3.35
# TB/s; Tflop/s float64 67 in tensor cores, float32 67, bfloat16 and float16 1,979 with sparsity, float8 and int8
# 3,958 (half of it dense); NVLink 4 of 900 GB/s in both directions together. "DGX H100/H200 User Guide",
# https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html : eight ConnectX-7 of 400 Gb/s.
_HOPPER = {"float64": 67e12, "float32": 67e12, "bfloat16": 989.5e12, "float16": 989.5e12,
           "float8_e4m3fn": 1979e12, "float8_e5m2": 1979e12, "int8": 1979e12}
_NVLINK4 = Level("NVLink 4", 8, 450e9, _NVLINK)
_NDR = Level("InfiniBand NDR", 1, 50e9, _NETWORK)

#: Name -> one node, and the network that joins several of them.
PRESETS: dict[str, tuple[Cluster, Level]] = {
    "h100x8": (Cluster("h100x8", (_NVLINK4,), 80e9, _HOPPER, 3.35e12, _LAUNCH), _NDR),
    # NVIDIA, "H200 Tensor Core GPU", specifications (SXM), https://www.nvidia.com/en-us/data-center/h200/ : as an
    # H100, with 141 GB at 4.8 TB/s.
    "h200x8": (Cluster("h200x8", (_NVLINK4,), 141e9, _HOPPER, 4.8e12, _LAUNCH), _NDR),
    # NVIDIA, "A100 Tensor Core GPU", specifications (80GB SXM), https://www.nvidia.com/en-us/data-center/a100/ : 80
    # GB at 2,039 GB/s; Tflop/s float64 19.5 in tensor cores, float32 19.5, bfloat16 and float16 312, int8 624; NVLink
    # 3 of 600 GB/s in both directions together. "DGX A100 User Guide",
    # https://docs.nvidia.com/dgx/dgxa100-user-guide/introduction-to-dgxa100.html : eight ConnectX-6 of 200 Gb/s for
    # computing.
    "a100x8": (Cluster("a100x8", (Level("NVLink 3", 8, 300e9, _NVLINK),), 80e9,
                       {"float64": 19.5e12, "float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12, "int8": 624e12},
                       2.039e12, _LAUNCH), Level("InfiniBand HDR", 1, 25e9, _NETWORK)),
    # Huawei, "Atlas 800T A2", technical specifications,
    # https://support.huawei.com/enterprise/zh/doc/EDOC1100317202/f3dba488 : eight Ascend 910B of 64 GB at 1.6 TB/s;
    # Tflop/s float16 313, float32 75; joined each to each by HCCS, 392 GB/s in both directions over seven links; a
    # port of 200 Gb/s (RoCE) each. Others cite that page for HCCS; for float16 they have anything from 256 to 400.
    # Assumed: bfloat16 as float16, both being of two bytes and for the same units; int8 twice that, as on the Ascend
    # 910 (256 and 512). Assumed, for none are published, the latencies: of HCCS that of PCI Express, the slower of
    # the two that are known within a node; of RoCE that of the network above. A group of fewer than eight has fewer
    # than seven links, which a level cannot say.
    "ascend910bx8": (Cluster("ascend910bx8", (Level("HCCS", 8, 196e9, _PCI),), 64e9,
                             {"float32": 75e12, "bfloat16": 313e12, "float16": 313e12, "int8": 626e12},
                             1.6e12, _LAUNCH), Level("RoCE", 1, 25e9, _NETWORK)),
}

# AMD, "Ryzen 7 7840U", https://www.amd.com/en/products/apu/amd-ryzen-7-7840u : 8 cores of 3.3 GHz, two channels of
# DDR5-5600, which are 89.6 GB/s. Two units of 8 float32 lanes that multiply and add in one cycle make 32 flop a cycle
# and core: Agner Fog, "Instruction tables", Zen 4, https://www.agner.org/optimize/instruction_tables.pdf . Assumed:
# 16 GB, as laptops commonly have. Assumed: half of the bandwidth for what goes from process to process, for all
# together, as it is written and read.
_CORES, _FLOPS, _MEMORY_BANDWIDTH, _MEMORY = 8, 8 * 32 * 3.3e9, 89.6e9, 16e9
# Seconds for one meeting of two processes on two cores: measured, an all-reduce of 32 bytes through memory that they share
# (`runtime/same_host.py`) takes 45 us, and 87 on four ranks.
_MEETING = 45e-6
# Seconds for one operator of PyTorch on a processor. Assumed: of the order of a call from Python to a kernel, and
# below `_LAUNCH`, for there is nothing to launch. What a machine takes, `shardwright calibrate` measures.
_CALL = 2e-6


def _laptop(devices: int) -> Cluster:
    """A laptop's processor as so many devices, each with its share of cores and memory."""
    return Cluster("cpu", (Level("shared memory", devices, _MEMORY_BANDWIDTH / 2, _MEETING, shared=True),),
                   _MEMORY / devices, {"float32": _FLOPS / devices, "float64": _FLOPS / 2 / devices},
                   _MEMORY_BANDWIDTH / devices, _CALL)


def preset(name: str, devices: int | None = None) -> Cluster:
    """The cluster of that name: "h100x8" is one node, "h100x8x128" are 128, "cpu" a processor shared by `devices`.

    Raises:
        SettingError: no cluster has that name.
    """
    if name == "cpu":
        return _laptop(devices or _CORES)
    found = re.fullmatch(r"(\w+?x\d+)(?:x([1-9]\d*))?", name)
    if found is None or found[1] not in PRESETS:
        raise SettingError(f"no cluster is called {name!r}",
                           legal=f'{", ".join(PRESETS)}, with "x" and a number of nodes behind it where there are '
                                 'several ("h100x8x128"); "cpu"; or the path of a JSON file')
    node, network = PRESETS[found[1]]
    nodes = int(found[2] or 1)
    return node if nodes == 1 else replace(node, name=name, levels=(*node.levels, replace(network, size=nodes)))
