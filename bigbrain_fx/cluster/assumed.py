"""What a forecast rests on that nobody measured: cards by their datasheets, and what links them.

It reads a cluster; it knows no models but the type that one computes in.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from bigbrain_fx.cluster.presets import PRESETS
from bigbrain_fx.core import Cluster, Device, Link

_FEW = 4


def assumed(cluster: Cluster, autocast: str | None = None) -> tuple[str, ...]:
    """Return a sentence for each card, each kind of link, and each type that a card lacks."""
    by_card: dict[str, list[Device]] = {}
    for device in cluster.devices:
        if device.preset in PRESETS:
            by_card.setdefault(device.preset, []).append(device)
    found = [_card(name, devices) for name, devices in by_card.items()]
    found += [_lacking(devices, autocast) for devices in by_card.values() if autocast]
    return tuple(filter(None, (*found, *_wires(cluster, by_card))))


def _card(name: str, devices: Sequence[Device]) -> str:
    card, device = PRESETS[name], devices[0]
    said = f"{device.flops_per_s / 1e12:.3g} TFLOP/s in float32"
    if device.half_flops_per_s and device.half_flops_per_s > device.flops_per_s:
        said += f", {device.half_flops_per_s / 1e12:.3g} in half precision"
    if device.tf32_flops_per_s:
        which = "convolutions" if device.matmul_precision == "highest" else "all products"
        said += f", {device.tf32_flops_per_s / 1e12:.3g} in TF32 ({which})"
    said += f", {device.memory_bytes_per_s / 1e9:.3g} GB/s"
    who = card.sustained.source
    basis = "no measurement of this card" if who == "usual" else f"measured by {who}"
    return f"{_names(devices)}: {name} by its datasheet, of which models reach {said} ({basis})"


def _lacking(devices: Sequence[Device], autocast: str | None) -> str:
    if autocast not in devices[0].lacks:
        return ""
    return (
        f"{_names(devices)}: {devices[0].preset} has no units for {autocast}: its products are "
        "forecast at the float32 rate"
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
