"""The table of `presets`: one line a card, its datasheet, and where shares of it were measured.

Rates are dense (no structured sparsity). Half is FP16 with FP32 sums; GeForce cards of Ampere and
Ada do these at half of their rate with FP16 sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from bigbrain_fx.core import BLAS_BYTES, BLAS_BYTES_FROM_HOPPER_ON

_GB = 10**9
_TERA = 1e12


@dataclass(frozen=True, slots=True)
class Sustained:
    """Shares of the datasheet's rates that products and passes over memory of models reach.

    `source` says who measured it; "usual" stands for nobody: the middle of the cards that were.
    """

    fp32: float = 0.75
    tf32: float = 0.6
    half: float = 0.65
    memory: float = 0.85
    source: str = "usual"


USUAL = Sustained()


@dataclass(frozen=True, slots=True)
class Wire:
    """Link between two of these cards in one host, and its source."""

    name: str
    bytes_per_s: float
    latency_s: float
    source: str


_STAGED = "half of three quarters of 15.75 GB/s: through the host's memory, up and down again"
PCIE_3 = Wire("PCIe 3.0 x16", 6e9, 2e-5, _STAGED)
PCIE_4 = Wire("PCIe 4.0 x16", 12e9, 2e-5, "twice PCIe 3.0")
PCIE_5 = Wire("PCIe 5.0 x16", 24e9, 2e-5, "four times PCIe 3.0")
NVLINK_1 = Wire("NVLink 1", 35e9, 1e-5, "P100 datasheet: 160 GB/s over 4 links, both ways; two")
NVLINK_2 = Wire("NVLink 2", 45e9, 1e-5, "two of six links of 25 GB/s: DGX-1V's cube mesh")
NVLINK_3 = Wire("NVLink 3", 235e9, 1e-5, "A100 datasheet: 600 GB/s both ways, 0.78 of it assumed")
NVLINK_4 = Wire("NVLink 4", 350e9, 1e-5, "H100 datasheet: 900 GB/s both ways, 0.78 of it assumed")
NVLINK_5 = Wire("NVLink 5", 700e9, 1e-5, "B200 datasheet: 1,800 GB/s both ways; as NVLink 4")
FABRIC_3 = Wire("Infinity Fabric", 40e9, 1e-5, "MI250: 50 GB/s a link, one way, less a fifth")
FABRIC_4 = Wire("Infinity Fabric", 50e9, 1e-5, "MI300X: 64 GB/s a link, one way, less a fifth")


@dataclass(frozen=True, slots=True)
class Preset:
    """One card: memory, peak rates, bandwidth, and the figures' source; and what models reach.

    `lacks` are types that its units cannot multiply: they are computed at the FP32 rate. `host` is
    how long its host takes to start an op, where that is part of the card: of an A100's host 1.
    """

    memory_bytes: int
    flops_per_s: float
    half_flops_per_s: float
    memory_bytes_per_s: float
    source: str
    blas_bytes: int = BLAS_BYTES
    tf32_flops_per_s: float | None = None
    sustained: Sustained = USUAL
    wire: Wire = PCIE_4
    lacks: tuple[str, ...] = field(default=())
    host: float = 1.0

    @property
    def launch_s(self) -> float | None:
        """Seconds to start an op on a host of the card's age; None: as usual.

        NVIDIA DeepLearningExamples, EfficientNet-B0 and B4 at batch 1, in one container. An A100's
        host took 0.71 and 0.70 of the time of a V100's (9.3 and 13.2 ms, 16.2 and 23.3).
        """
        return None if self.tf32_flops_per_s is None else 10.5e-6 * self.host

    @property
    def sustained_flops_per_s(self) -> float:
        """FP32 products of models."""
        return self.flops_per_s * self.sustained.fp32

    @property
    def sustained_half_flops_per_s(self) -> float:
        """FP16 products of models; the FP32 rate where the card has no faster one."""
        if self.half_flops_per_s <= self.flops_per_s:
            return self.sustained_flops_per_s
        return self.half_flops_per_s * self.sustained.half

    @property
    def sustained_tf32_flops_per_s(self) -> float | None:
        """TF32 products of models; None where the card has none."""
        return (
            None if self.tf32_flops_per_s is None else self.tf32_flops_per_s * self.sustained.tf32
        )

    @property
    def sustained_memory_bytes_per_s(self) -> float:
        """Bytes per second that passes over memory move."""
        return self.memory_bytes_per_s * self.sustained.memory


_BF16 = ("bfloat16",)
_BOTH = ("bfloat16", "float16")


def _card(
    memory: float,
    fp32: float,
    half: float,
    bandwidth: float,
    source: str,
    wire: Wire = PCIE_4,
    tf32: float | None = None,
    sustained: Sustained = USUAL,
    lacks: tuple[str, ...] = (),
    blas_bytes: int = BLAS_BYTES,
) -> Preset:
    """Write a card in GB, TFLOP/s and GB/s."""
    return Preset(
        round(memory * _GB),
        fp32 * _TERA,
        half * _TERA,
        bandwidth * 1e9,
        source,
        blas_bytes,
        None if tf32 is None else tf32 * _TERA,
        sustained,
        wire,
        lacks,
    )


def _old(
    memory: float, fp32: float, bandwidth: float, source: str, sustained: Sustained = USUAL
) -> Preset:
    """Write a card without tensor cores and without fast half precision: Pascal."""
    return _card(memory, fp32, fp32, bandwidth, source, PCIE_3, sustained=sustained, lacks=_BOTH)


def _geforce(
    memory: float,
    fp32: float,
    bandwidth: float,
    source: str,
    wire: Wire = PCIE_4,
    sustained: Sustained | None = None,
) -> Preset:
    """Write a GeForce from Ampere on: TF32 as fast as FP32, half with FP32 sums twice that."""
    own = sustained or _GEFORCE
    return _card(memory, fp32, 2 * fp32, bandwidth, source, wire, fp32, own)


def _hopper(
    memory: float,
    fp32: float,
    half: float,
    bandwidth: float,
    source: str,
    wire: Wire = NVLINK_4,
    sustained: Sustained = USUAL,
) -> Preset:
    rates = memory, fp32, half, bandwidth
    return _card(*rates, source, wire, half / 2, sustained, blas_bytes=BLAS_BYTES_FROM_HOPPER_ON)


# Fitted by `python -m tools.studies.published_gpus.fitting`; where a source says nothing of a rate
# it is the usual one, and L4's half rate is between T4's, a card of the same power cap, and the
# usual.
_V100 = Sustained(0.95, 0.6, 0.63, 0.85, "NeuSight's labels and DeepLearningExamples")
_A100_40 = Sustained(0.84, 0.6, 0.77, 0.8, "NeuSight's labels and llm-foundry's tables")
_A100_80 = Sustained(0.84, 0.6, 0.77, 0.8, "llm-foundry's tables and DeepLearningExamples")
_A100_40_PCIE = Sustained(0.9, 0.6, 0.7, 0.8, "NeuSight's labels")
_A100_80_PCIE = Sustained(0.74, 0.6, 0.7, 0.8, "NeuSight's labels")
_H100 = Sustained(0.7, 0.6, 0.63, 0.82, "NeuSight's labels and llm-foundry's tables")
_P100 = Sustained(0.78, 0.6, 0.6, 0.85, "NeuSight's labels")
_P4 = Sustained(0.47, 0.6, 0.6, 0.85, "NeuSight's labels")
_P40 = Sustained(0.69, 0.6, 0.6, 0.77, "torchgpipe's benchmarks, pipelines too")
_T4 = Sustained(0.6, 0.6, 0.49, 0.82, "NeuSight's labels and DeepLearningExamples")
_L4 = Sustained(0.36, 0.45, 0.55, 0.85, "NeuSight's labels")
_3090 = Sustained(0.75, 0.75, 1.0, 0.95, "timm's benchmarks")
_GEFORCE = Sustained(0.75, 0.75, 0.95, 0.9, "timm's benchmarks of the RTX 3090, of the same make")
_4090 = Sustained(0.75, 0.75, 1.01, 1.05, "timm's benchmarks of the RTX 4090, beside the 3090's")
_ADA = Sustained(0.75, 0.75, 1.01, 1.0, "timm's benchmarks of the RTX 4090, of the same make")
"""A 72 MB cache (6 MB on Ampere) makes passes faster than the memory; clocks rise over "boost"."""

_turing = partial(_card, wire=PCIE_3, lacks=_BF16)
_p100 = partial(_card, sustained=_P100, lacks=_BF16)
_v100 = partial(_card, sustained=_V100, lacks=_BF16)

_PASCAL = "NVIDIA Tesla P100 datasheet, 2016"
_VOLTA = "NVIDIA V100 datasheet, Jan 2020"
_TU = "NVIDIA Turing whitepaper WP-09183, reference boards"
_GA = "NVIDIA Ampere GA102 whitepaper, appendix A"
_GEFORCE_30 = "NVIDIA GeForce RTX 30 series specifications"
_AD = "NVIDIA Ada whitepaper, appendix A"
_GEFORCE_40 = "NVIDIA GeForce RTX 40 series specifications"
_GEFORCE_50 = "NVIDIA RTX Blackwell whitepaper, appendix A"
_CDNA = "AMD Instinct data sheet; a device is one of the card's two dies"

GRACE = 1.29
"""Sailor's profile, forward of a block of OPT-350M of 1 row, by four GPUs: the process's clock on
both (A100, 1.16 ms; GH200 1.50, and 1.44 by two)."""

CARDS: Mapping[str, Preset] = {
    "p100-16": _p100(16, 9.3, 18.7, 732, f"{_PASCAL}, PCIe 16 GB", PCIE_3),
    "p100-12": _p100(12, 9.3, 18.7, 549, f"{_PASCAL}, PCIe 12 GB", PCIE_3),
    "p100-16-sxm2": _p100(16, 10.6, 21.2, 732, f"{_PASCAL}, SXM2", NVLINK_1),
    "p4": _old(8, 5.5, 192, "NVIDIA Tesla P4 datasheet, 2016", _P4),
    "p40": _old(24, 11.76, 346, "NVIDIA Tesla P40 datasheet, 2016", _P40),
    "gtx-1080": _old(8, 8.9, 320, "NVIDIA GeForce GTX 1080 whitepaper"),
    "gtx-1080-ti": _old(11, 11.3, 484, "NVIDIA GeForce GTX 1080 Ti specifications"),
    "v100-16": _v100(16, 15.7, 125, 900, f"{_VOLTA}, V100 SXM2 16 GB", NVLINK_2),
    "v100-32": _v100(32, 15.7, 125, 900, f"{_VOLTA}, V100 SXM2 32 GB", NVLINK_2),
    "v100-16-pcie": _v100(16, 14, 112, 900, f"{_VOLTA}, V100 PCIe 16 GB", PCIE_3),
    "v100-32-pcie": _v100(32, 14, 112, 900, f"{_VOLTA}, V100 PCIe 32 GB", PCIE_3),
    "v100s": _v100(32, 16.4, 130, 1134, f"{_VOLTA}, V100S PCIe 32 GB", PCIE_3),
    "titan-v": _card(
        12, 14.9, 110, 652.8, "NVIDIA TITAN V specifications, 2017", PCIE_3, lacks=_BF16
    ),
    "titan-rtx": _turing(24, 16.3, 130.5, 672, _TU),
    "rtx-2060": _turing(6, 6.5, 25.8, 336, "NVIDIA GeForce RTX 2060 specifications"),
    "rtx-2070": _turing(8, 7.5, 29.9, 448, _TU),
    "rtx-2080": _turing(8, 10.1, 40.3, 448, _TU),
    "rtx-2080-ti": _turing(11, 13.4, 53.8, 616, _TU),
    "quadro-rtx-6000": _turing(24, 16.3, 130.5, 672, _TU),
    "quadro-rtx-8000": _turing(48, 16.3, 130.5, 672, "NVIDIA Quadro RTX 8000 datasheet, 2019"),
    "t4": _turing(16, 8.1, 65, 320, "NVIDIA T4 product brief PB-09256, 2019", sustained=_T4),
    "a100-40": _card(
        40, 19.5, 312, 1555, "NVIDIA A100 datasheet, 2020, SXM4 40 GB", NVLINK_3, 156, _A100_40
    ),
    "a100-80": _card(
        80, 19.5, 312, 2039, "NVIDIA A100 datasheet, Jun 2021, SXM4 80 GB", NVLINK_3, 156, _A100_80
    ),
    "a100-40-pcie": _card(
        40, 19.5, 312, 1555, "NVIDIA A100 datasheet, 2020, PCIe 250 W", PCIE_4, 156, _A100_40_PCIE
    ),
    "a100-80-pcie": _card(
        80,
        19.5,
        312,
        1935,
        "NVIDIA A100 datasheet, Jun 2021, PCIe 300 W",
        PCIE_4,
        156,
        _A100_80_PCIE,
    ),
    "a2": _card(16, 4.5, 18, 200, "NVIDIA A2 datasheet, 2021", PCIE_4, 9),
    "a10": _card(24, 31.2, 125, 600, "NVIDIA A10 datasheet, 2021, 150 W", PCIE_4, 62.5),
    "a10g": _card(24, 31.5, 70, 600, "NVIDIA A10G product page; AWS g5, 300 W", PCIE_4, 35),
    "a30": _card(24, 10.3, 165, 933, "NVIDIA A30 datasheet, 2021, 165 W", PCIE_4, 82),
    "a40": _card(48, 37.4, 149.7, 696, "NVIDIA A40 datasheet, 2021, 300 W", PCIE_4, 74.8),
    "a4000": _card(16, 19.2, 76.7, 448, "NVIDIA RTX A4000 datasheet, 2021", PCIE_4, 38.3),
    "a5000": _card(24, 27.8, 111.1, 768, "NVIDIA RTX A5000 datasheet, 2021", PCIE_4, 55.6),
    "a6000": _card(48, 38.7, 154.8, 768, "NVIDIA RTX A6000 datasheet, 2020", PCIE_4, 77.4),
    "rtx-3060-8": _geforce(8, 12.7, 240, _GEFORCE_30),
    "rtx-3060-12": _geforce(12, 12.7, 360, _GEFORCE_30),
    "rtx-3060-ti": _geforce(8, 16.2, 448, _GEFORCE_30),
    "rtx-3070": _geforce(8, 20.3, 448, _GA),
    "rtx-3070-ti": _geforce(8, 21.7, 608, _GEFORCE_30),
    "rtx-3080-10": _geforce(10, 29.8, 760, _GA),
    "rtx-3080-12": _geforce(12, 30.6, 912, _GEFORCE_30),
    "rtx-3080-ti": _geforce(12, 34.1, 912, _GEFORCE_30),
    "rtx-3090": _geforce(24, 35.6, 936, _GA, sustained=_3090),
    "rtx-3090-ti": _geforce(24, 40.0, 1008, _GEFORCE_30),
    "l4": _card(24, 30.3, 121, 300, "NVIDIA L4 datasheet, 2023, 72 W", PCIE_4, 60, _L4),
    "l40": _card(48, 90.5, 181, 864, "NVIDIA L40 datasheet, 2022, 300 W", PCIE_4, 90.5),
    "l40s": _card(48, 91.6, 362, 864, "NVIDIA L40S datasheet, 2023, 350 W", PCIE_4, 183),
    "rtx-6000-ada": _card(48, 91.1, 364, 960, "NVIDIA RTX 6000 Ada datasheet, 2023", PCIE_4, 182),
    "rtx-4060": _geforce(8, 15.1, 272, _GEFORCE_40, sustained=_ADA),
    "rtx-4060-ti-8": _geforce(8, 22.1, 288, _GEFORCE_40, sustained=_ADA),
    "rtx-4060-ti-16": _geforce(16, 22.1, 288, _GEFORCE_40, sustained=_ADA),
    "rtx-4070": _geforce(12, 29.1, 504, _GEFORCE_40, sustained=_ADA),
    "rtx-4070-super": _geforce(12, 35.5, 504, _GEFORCE_40, sustained=_ADA),
    "rtx-4070-ti": _geforce(12, 40.1, 504, _GEFORCE_40, sustained=_ADA),
    "rtx-4070-ti-super": _geforce(16, 44.1, 672, _GEFORCE_40, sustained=_ADA),
    "rtx-4080": _geforce(16, 48.7, 716.8, _AD, sustained=_ADA),
    "rtx-4080-super": _geforce(16, 52.2, 736, _GEFORCE_40, sustained=_ADA),
    "rtx-4090": _geforce(24, 82.6, 1008, _AD, sustained=_4090),
    "rtx-5070": _geforce(12, 30.9, 672, _GEFORCE_50, PCIE_5),
    "rtx-5070-ti": _geforce(16, 43.9, 896, _GEFORCE_50, PCIE_5),
    "rtx-5080": _geforce(16, 56.3, 960, _GEFORCE_50, PCIE_5),
    "rtx-5090": _geforce(32, 104.8, 1792, _GEFORCE_50, PCIE_5),
    "h100": _hopper(80, 67, 989, 3350, "NVIDIA H100 datasheet, SXM5 80 GB, 700 W", NVLINK_4, _H100),
    "h100-pcie": _hopper(
        80, 51, 756, 2000, "NVIDIA H100 datasheet, Jul 2022, PCIe 350 W", PCIE_5, _H100
    ),
    "h100-nvl": _hopper(94, 60, 835, 3938, "NVIDIA H100 datasheet, NVL 400 W", PCIE_5, _H100),
    "h200": _hopper(141, 67, 989, 4800, "NVIDIA H200 datasheet, SXM", NVLINK_4, _H100),
    "h200-nvl": _hopper(141, 60, 835, 4800, "NVIDIA H200 datasheet, NVL 600 W", PCIE_5, _H100),
    "gh200-96": replace(
        _hopper(96, 67, 990, 4000, "NVIDIA GH200 datasheet, HBM3", NVLINK_4, _H100), host=GRACE
    ),
    "b200": _hopper(180, 75, 2250, 7700, "NVIDIA DGX B200 datasheet, a GPU's part", NVLINK_5),
    "mi100": _card(32, 46.1, 184.6, 1229, "AMD Instinct MI100 data sheet, 2020", PCIE_4),
    "mi210": _card(64, 45.3, 181, 1638, "AMD Instinct MI210 data sheet, 2022", PCIE_4),
    "mi250": _card(64, 45.3, 181, 1638, f"{_CDNA}, MI250", FABRIC_3),
    "mi250x": _card(64, 47.9, 191.5, 1638, f"{_CDNA}, MI250X", FABRIC_3),
    "mi300x": _card(192, 163.4, 1307, 5300, "AMD Instinct MI300X data sheet, 2023", FABRIC_4, 654),
    "mi325x": _card(256, 163.4, 1307, 6000, "AMD Instinct MI325X data sheet, 2024", FABRIC_4, 654),
    "rx-7900-xtx": _card(24, 61.4, 122.8, 960, "AMD Radeon RX 7900 XTX specifications", PCIE_4),
}

_UNITS = """
p100-16 56  p100-12 56  p100-16-sxm2 56  p4 20  p40 30  gtx-1080 20  gtx-1080-ti 28
v100-16 80  v100-32 80  v100-16-pcie 80  v100-32-pcie 80  v100s 80  titan-v 80
titan-rtx 72  rtx-2060 30  rtx-2070 36  rtx-2080 46  rtx-2080-ti 68
quadro-rtx-6000 72  quadro-rtx-8000 72  t4 40
a100-40 108  a100-80 108  a100-40-pcie 108  a100-80-pcie 108
a2 10  a10 72  a10g 80  a30 56  a40 84  a4000 48  a5000 64  a6000 84
rtx-3060-8 28  rtx-3060-12 28  rtx-3060-ti 38  rtx-3070 46  rtx-3070-ti 48
rtx-3080-10 68  rtx-3080-12 70  rtx-3080-ti 80  rtx-3090 82  rtx-3090-ti 84
l4 58  l40 142  l40s 142  rtx-6000-ada 142
rtx-4060 24  rtx-4060-ti-8 34  rtx-4060-ti-16 34  rtx-4070 46  rtx-4070-super 56
rtx-4070-ti 60  rtx-4070-ti-super 66  rtx-4080 76  rtx-4080-super 80  rtx-4090 128
rtx-5070 48  rtx-5070-ti 70  rtx-5080 84  rtx-5090 170
h100 132  h100-pcie 114  h100-nvl 132  h200 132  h200-nvl 132  gh200-96 132  b200 148
mi100 120  mi210 104  mi250 104  mi250x 110  mi300x 304  mi325x 304  rx-7900-xtx 96
"""
UNITS: Mapping[str, int] = {
    name: int(count) for name, count in zip(_UNITS.split()[::2], _UNITS.split()[1::2], strict=True)
}
"""Multiprocessors (AMD: compute units), from the same datasheets."""

_ROWS = """
p100-16 fp32  p4 fp32  p40 fp32  v100-16 fp32,half  v100-32 fp32,half  v100-32-pcie fp32
t4 fp32,half  a100-40 fp32,half  a100-80 tf32,half  a100-40-pcie fp32  a100-80-pcie fp32
rtx-3090 half  rtx-4090 half  l4 fp32  h100 fp32,half
"""
MEASURED: Mapping[str, tuple[str, ...]] = {
    name: tuple(kinds.split(","))
    for name, kinds in zip(_ROWS.split()[::2], _ROWS.split()[1::2], strict=True)
}
"""Rates of a card that forecasts were held against published rows of;
tools/studies/published_gpus."""
