"""What the vendor's datasheet says about common GPUs.

This room is a table; it does not know how a device is written in a file.

The figures are the datasheet's own, unscaled: peak *FP32* without tensor cores, because that is
what torch multiplies FP32 matrices with unless `torch.set_float32_matmul_precision("high")` (TF32)
is on (then write that rate beside the preset, `"flops": "495TFLOP/s"`), and the dense rate of
FP16 products with FP32 sums, for models under autocast. A
card sustains some 80 to 90 % of either figure: `bigbrain-fx doctor` on the machine is better.
Memory is the datasheet's number in *decimal* gigabytes. Cards report up to 7 % more than that, and
the CUDA context, ECC and the allocator's fragments take about as much. What no datasheet says is
cuBLAS's workspace: torch chooses it by the card's compute capability.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bigbrain_fx.cluster.quantity import BadValueError, nearest, quoted
from bigbrain_fx.core import BLAS_BYTES, BLAS_BYTES_FROM_HOPPER_ON

_GB = 10**9
_TERA = 1e12


@dataclass(frozen=True, slots=True)
class Preset:
    """One card: memory, peak rates of FP32 and FP16, memory bandwidth, and the figures' source."""

    memory_bytes: int
    flops_per_s: float
    half_flops_per_s: float
    memory_bytes_per_s: float
    source: str
    blas_bytes: int = BLAS_BYTES


PRESETS: Mapping[str, Preset] = {
    "v100-16": Preset(
        16 * _GB,
        15.7 * _TERA,
        125 * _TERA,
        900e9,
        "NVIDIA V100 datasheet, Jan 2020, V100 SXM2 16 GB",
    ),
    "v100-32": Preset(
        32 * _GB,
        15.7 * _TERA,
        125 * _TERA,
        900e9,
        "NVIDIA V100 datasheet, Jan 2020, V100 SXM2 32 GB",
    ),
    "a100-40": Preset(
        40 * _GB, 19.5 * _TERA, 312 * _TERA, 1555e9, "NVIDIA A100 datasheet, 2020, A100 40GB SXM4"
    ),
    "a100-80": Preset(
        80 * _GB,
        19.5 * _TERA,
        312 * _TERA,
        2039e9,
        "NVIDIA A100 datasheet, Jun 2021, A100 80GB SXM4",
    ),
    "h100": Preset(
        80 * _GB,
        67 * _TERA,
        989 * _TERA,
        3350e9,
        "NVIDIA H100 datasheet, H100 SXM5 80 GB",
        BLAS_BYTES_FROM_HOPPER_ON,
    ),
    "h100-pcie": Preset(
        80 * _GB,
        51 * _TERA,
        756 * _TERA,
        2000e9,
        "NVIDIA H100 datasheet, Jul 2022, H100 PCIe 80 GB",
        BLAS_BYTES_FROM_HOPPER_ON,
    ),
    "h200": Preset(
        141 * _GB,
        67 * _TERA,
        989 * _TERA,
        4800e9,
        "NVIDIA H200 datasheet, H200 SXM",
        BLAS_BYTES_FROM_HOPPER_ON,
    ),
    "l4": Preset(24 * _GB, 30.3 * _TERA, 121 * _TERA, 300e9, "NVIDIA L4 datasheet, 2023"),
    "t4": Preset(
        16 * _GB, 8.1 * _TERA, 65 * _TERA, 320e9, "NVIDIA T4 product brief PB-09256, 2019"
    ),
    "rtx-3090": Preset(
        24 * _GB,
        35.6 * _TERA,
        71 * _TERA,
        936e9,
        "NVIDIA Ampere GA102 whitepaper, GeForce RTX 3090",
    ),
    "rtx-4090": Preset(
        24 * _GB,
        82.6 * _TERA,
        165.2 * _TERA,
        1008e9,
        "NVIDIA Ada whitepaper, appendix A, GeForce RTX 4090",
    ),
    "a6000": Preset(
        48 * _GB, 38.7 * _TERA, 154.8 * _TERA, 768e9, "NVIDIA RTX A6000 datasheet, 2020"
    ),
}

_ALIASES = {"v100": "v100-16", "rtxa6000": "a6000", "h100sxm": "h100", "h200sxm": "h200"}


def preset(name: str) -> Preset:
    """Look a card up; case, blanks and hyphens do not matter: "RTX 3090", "rtx3090", "rtx-3090".

    Raises:
        BadValueError: no such card; names the nearest.
    """
    key = _key(name)
    by_key = {_key(known): known for known in PRESETS}
    known = _ALIASES.get(key) or by_key.get(key)
    if known:
        return PRESETS[known]
    near = nearest(key, by_key)
    hint = f"nearest: {', '.join(by_key[k] for k in near)}; " if near else ""
    raise BadValueError(
        f"unknown preset {quoted(name)}",
        f"{hint}known: {', '.join(PRESETS)}; or write memory, flops and memory_bandwidth yourself",
    )


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
