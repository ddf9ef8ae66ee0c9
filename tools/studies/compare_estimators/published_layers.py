"""Public per-layer profiles -> rows of a profile database, to compare estimators on.

- `pipedream/*/graph.txt`: forward times of the layers of six networks on one GPU, which the files
  do not name. Backward times stand there too, but charged to other layers than they belong to (an
  LSTM of 17 M parameters with 5 ms forward has 0.016 ms), so they are not used.
- Alpa's database (`tools.studies.collectives`) has square products on a V100, float32 and float16.

Other public files have no further device: piper's times are pipedream's, and in the
dnn-partitioning files the CPU's time of every node is the accelerator's times one constant
(`constant_ratios` checks that).
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from bigbrain_fx.cluster import PRESETS
from bigbrain_fx.costs.fit import Row
from bigbrain_fx.costs.profiles import Machine, OpProfile, Signature, TensorArg
from tools.studies.collectives.__main__ import FILE

_FLOAT = 4
_LAYER = re.compile(r"^(\w+) -- (.*) -- forward_compute_time=([\d.]+), .*?activation_size=(.*?), ")
_FIRST_NUMBER = re.compile(r"[\d.]+")
_DOT = re.compile(r"\(\(\), '(f16|f32)'\): \[(.*)\]")
_POINT = re.compile(r"\((\d+), ([^()]+)\)")
_V100_BYTES_PER_S = PRESETS["v100-16"].memory_bytes_per_s  # products do not show it
_HIGH, _LOW = 0.95, 0.05  # quantiles that stand for a device's rates


@dataclass(frozen=True)
class Published:
    """Rows, and which network each signature came from."""

    rows: tuple[Row, ...]
    networks: dict[str, frozenset[str]]


def read_published(folder: Path) -> Published:
    """Read all that is found below a folder; nothing found is no error."""
    layers = {path.parent.name: list(read_layers(path)) for path in _graphs(folder)}
    rows: list[Row] = list(_on_one_machine("unnamed GPU of pipedream", layers))
    for path in sorted(folder.rglob(FILE))[:1]:
        rows += list(read_products(path.read_text()))
    networks: dict[str, set[str]] = {}
    for name, profiles in layers.items():
        for profile in profiles:
            networks.setdefault(profile.signature.key, set()).add(name)
    return Published(tuple(rows), {key: frozenset(found) for key, found in networks.items()})


def _graphs(folder: Path) -> list[Path]:
    return sorted(folder.rglob("pipedream/*/graph.txt"))


# --------------------------------------------------------------------------- pipedream's layers


def read_layers(path: Path) -> Iterator[OpProfile]:
    """Yield the layers of one network that are a single op of known shapes and took time."""
    for line in path.read_text().splitlines():
        found = _LAYER.match(line)
        if found is None:
            continue
        forward_s, nbytes = 1e-3 * float(found[3]), _FIRST_NUMBER.search(found[4])
        if forward_s > 0.0 and nbytes is not None:
            bare = _layer(found[2], round(float(nbytes[0])) // _FLOAT)
            if bare is not None:
                yield replace(bare, forward_s=forward_s)


def _layer(text: str, elements: int) -> OpProfile | None:
    """Return a layer as an op, by its module's text and the elements of its result."""
    name, _, rest = text.partition("(")
    made = _LAYERS.get(name)
    return made(rest, elements) if made else None


def _op(
    target: str, inputs: Sequence[TensorArg], out: tuple[int, ...], flops: int, literals: str = ""
) -> OpProfile:
    signed = Signature(
        f"aten.{target}", tuple(inputs), literals, (f"float32[{', '.join(map(str, out))}]",)
    )
    reads = _FLOAT * sum(tensor.numel for tensor in inputs)
    return OpProfile(
        signed, 0.0, flops=flops, reads_bytes=reads, writes_bytes=_FLOAT * math.prod(out)
    )


def _value(*shape: int) -> TensorArg:
    return TensorArg(shape, "float32")


def _weight(*shape: int) -> TensorArg:
    return TensorArg(shape, "float32", is_parameter=True)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in re.findall(r"(?<![\w.=-])\d+(?![\w.])", text)]


def _option(text: str, name: str, default: int) -> int:
    found = re.search(rf"{name}=\(?(\d+)", text)
    return int(found[1]) if found else default


def _convolution(text: str, elements: int) -> OpProfile:
    wide, deep = _numbers(text)[:2]
    window, stride = _option(text, "kernel_size", 1), _option(text, "stride", 1)
    per_group = wide // _option(text, "groups", 1)
    places = elements // deep
    inputs = [_value(places * stride**2, wide), _weight(deep, per_group, window, window)]
    flops = 2 * elements * per_group * window**2
    return _op("conv2d.default", inputs, (places, deep), flops)


def _product(text: str, elements: int) -> OpProfile:
    wide, deep = (_option(text, name, 0) for name in ("in_features", "out_features"))
    rows = elements // deep
    inputs = [_value(rows, wide), _weight(deep, wide), _weight(deep)]
    return _op("linear.default", inputs, (rows, deep), 2 * elements * wide)


def _lstm(text: str, elements: int) -> OpProfile:
    wide, deep = _numbers(text)[:2]
    rows = elements // deep
    inputs = [_value(rows, wide), _weight(4 * deep, wide), _weight(4 * deep, deep)]
    return _op("lstm.input", inputs, (rows, deep), 8 * elements * (wide + deep))


def _batch_norm(text: str, elements: int) -> OpProfile:
    (channels, *_) = _numbers(text)
    inputs = [_value(elements // channels, channels), _weight(channels), _weight(channels)]
    return _op("batch_norm.default", inputs, (elements // channels, channels), 8 * elements)


def _pooling(target: str) -> Callable[[str, int], OpProfile]:
    def made(text: str, elements: int) -> OpProfile:
        window = _option(text, "kernel_size", 2)
        stride = _option(text, "stride", window)
        read = elements * stride**2
        return _op(f"{target}.default", [_value(read)], (elements,), elements * window**2)

    return made


def _pointwise(target: str, per_element: int, inputs: int = 1) -> Callable[[str, int], OpProfile]:
    def made(text: str, elements: int) -> OpProfile:
        del text
        return _op(target, [_value(elements)] * inputs, (elements,), per_element * elements)

    return made


def _embedding(text: str, elements: int) -> OpProfile:
    rows, wide = _numbers(text)[:2]
    indices = TensorArg((elements // wide,), "int64")
    bare = _op("embedding.default", [_weight(rows, wide), indices], (elements // wide, wide), 0)
    return replace(bare, reads_bytes=_FLOAT * elements + 8 * indices.numel)  # its rows only


_LAYERS: dict[str, Callable[[str, int], OpProfile]] = {
    "Conv2d": _convolution,
    "Linear": _product,
    "LSTM": _lstm,
    "BatchNorm2d": _batch_norm,
    "MaxPool2d": _pooling("max_pool2d"),
    "AvgPool2d": _pooling("avg_pool2d"),
    "ReLU": _pointwise("relu.default", 1),
    "Add": _pointwise("add.Tensor", 1, inputs=2),
    "Dropout": _pointwise("dropout.default", 2),
    "Embedding": _embedding,
}


def _on_one_machine(name: str, layers: dict[str, list[OpProfile]]) -> Iterator[Row]:
    """Yield a row for each distinct op, its median where networks share it."""
    alike: dict[str, list[OpProfile]] = {}
    for profiles in layers.values():
        for profile in profiles:
            alike.setdefault(profile.signature.key, []).append(profile)
    merged = [
        replace(same[0], forward_s=statistics.median(p.forward_s for p in same), samples=len(same))
        for same in alike.values()
    ]
    if merged:
        machine = _machine(name, merged)
        yield from ((machine, profile) for profile in merged)


def _machine(name: str, profiles: Sequence[OpProfile]) -> Machine:
    """Take a device's rates from its own profile: the files say none."""
    rates = sorted(p.flops / p.forward_s for p in profiles if p.flops)
    copies = sorted((p.reads_bytes + p.writes_bytes) / p.forward_s for p in profiles)
    times = sorted(p.forward_s for p in profiles)
    return Machine(
        kind="cuda",
        processor=name,
        torch_version="unknown",
        threads=1,
        flops_per_s=rates[int(_HIGH * len(rates))],
        memory_bytes_per_s=copies[int(_HIGH * len(copies))],
        launch_s=times[int(_LOW * len(times))] / 4.0,
    )


# --------------------------------------------------------------------------- Alpa's products


def read_products(text: str) -> Iterator[Row]:
    """Yield the square matrix products of Alpa's V100; the text repeats them for every mesh."""
    for dtype, name in (("f32", "float32"), ("f16", "float16")):
        found = next((match for match in _DOT.finditer(text) if match[1] == dtype), None)
        points = [(int(n), float(s)) for n, s in _POINT.findall(found[2])] if found else []
        profiles = [_square(flops, seconds, name) for flops, seconds in _kept(points)]
        if profiles:
            machine = replace(
                _machine(f"V100 ({name})", profiles), memory_bytes_per_s=_V100_BYTES_PER_S
            )
            yield from ((machine, profile) for profile in profiles)


def _kept(points: Sequence[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    """Leave out what `make_monotonic` moved; see `tools.studies.collectives`."""
    for (before, before_s), (flops, seconds) in pairwise(points):
        if before == 0 or not math.isclose(seconds * before, before_s * flops, rel_tol=1e-9):
            yield flops, seconds


def _square(flops: int, seconds: float, dtype: str) -> OpProfile:
    side = round((flops / 2) ** (1 / 3))
    size = 4 if dtype == "float32" else 2
    tensor = TensorArg((side, side), dtype)
    signed = Signature("aten.mm.default", (tensor, tensor), "(%, %)", (f"{dtype}[{side}, {side}]",))
    return OpProfile(
        signed,
        seconds,
        flops=flops,
        reads_bytes=2 * size * side**2,
        writes_bytes=size * side**2,
    )


# --------------------------------------------------------------------------- what is no device


def constant_ratios(folder: Path) -> dict[str, float | None]:
    """Return, for each dnn-partitioning file, CPU time over accelerator time; None if it varies."""
    found: dict[str, float | None] = {}
    for path in sorted(folder.rglob("dnn-partitioning/*/*/*.json")):
        nodes = json.loads(path.read_text())["nodes"]
        ratios = {
            round(node["cpuLatency"] / node["fpgaLatency"], 2)
            for node in nodes
            if node["fpgaLatency"] and node["cpuLatency"] < 1e9
        }
        name = "/".join(path.with_suffix("").parts[-3:])
        found[name] = ratios.pop() if len(ratios) == 1 else None
    return found
