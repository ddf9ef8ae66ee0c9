"""Assumptions of a forecast that nobody measured: cards and their links by datasheet.

It reads a cluster; it knows no models but the type that one computes in.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from bigbrain_fx.cluster.presets import PRESETS
from bigbrain_fx.core import Cluster, Device, Graph, Link

_FEW = 4


def assumed(cluster: Cluster, graph: Graph) -> tuple[str, ...]:
    """Return a sentence for each card, each kind of link, and each type that a card lacks."""
    by_card: dict[str, list[Device]] = {}
    for device in cluster.devices:
        if device.preset in PRESETS:
            by_card.setdefault(device.preset, []).append(device)
    found = [_card(name, devices) for name, devices in by_card.items()]
    types = _types(graph)
    found += [text for devices in by_card.values() for text in _lacking(devices, types)]
    return tuple(filter(None, (*found, *_wires(cluster, by_card))))


def _card(name: str, devices: Sequence[Device]) -> str:
    card, device = PRESETS[name], devices[0]
    said = f"{device.flops_per_s / 1e12:.3g} TFLOP/s in float32"
    if device.half_flops_per_s and device.half_flops_per_s > device.flops_per_s:
        said += f", {device.half_flops_per_s / 1e12:.3g} in half precision"
    if device.tf32_flops_per_s:
        which = "convolutions" if device.matmul_precision == "highest" else "all products"
        said += f", {device.tf32_flops_per_s / 1e12:.3g} in TF32 ({which})"
    said += f", {device.memory_bytes_per_s / 1e9:,.0f} GB/s"
    who = card.sustained.source
    basis = "no measurement of this card" if who == "usual" else f"measured by {who}"
    return f"{_names(devices)}: {name} by its datasheet, of which models reach {said} ({basis})"


def _types(graph: Graph) -> tuple[str, ...]:
    """Return the types that a model's products may be computed in."""
    found = {param.spec.dtype for param in graph.params if param.kind == "parameter"}
    return tuple(sorted(found | ({graph.autocast} if graph.autocast else set())))


def _lacking(devices: Sequence[Device], types: Sequence[str]) -> Iterator[str]:
    device = devices[0]
    for dtype in types:
        if dtype in device.lacks:
            yield (
                f"{_names(devices)}: {device.preset} has no units for {dtype}: its products are "
                "forecast at the float32 rate"
            )
    if device.matmul_precision != "highest" and not device.tf32_flops_per_s:
        yield (
            f"{_names(devices)}: {device.preset} has no TF32, which matmul_precision "
            f"{device.matmul_precision} asks for: float32 products are forecast as they are"
        )


def _wires(cluster: Cluster, by_card: dict[str, list[Device]]) -> Iterator[str]:
    """Yield what links cards of one host, where their datasheets say it."""
    for name, devices in by_card.items():
        wire = PRESETS[name].wire
        said = Link(wire.latency_s, wire.bytes_per_s)
        pairs = itertools.pairwise(devices)
        if any(
            one.host == two.host and cluster.link(one.name, two.name) == said for one, two in pairs
        ):
            rate = f"{wire.bytes_per_s / 1e9:.3g} GB/s"
            yield f"{name} to {name} in one host: {wire.name}, {rate} ({wire.source})"


def _names(devices: Sequence[Device]) -> str:
    names = [device.name for device in devices]
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
