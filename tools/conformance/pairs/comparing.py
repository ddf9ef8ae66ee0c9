"""How near what a pair trained is to a loop, and the cluster that it is split for."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from bigbrain_fx.plan import Plan
from bigbrain_fx.runtime import joined
from bigbrain_fx.weights import part_name
from tools.conformance.pairs import loops
from tools.conformance.pairs.features import Pair

MICRO_BATCHES = 8
NEAR = 2e-5  # of the largest: float32 over some steps, in another order
LAST_PLACE = 2e-7  # of float32
NEAR_IN_GROUPS = 5e-2  # bfloat16 in another order


def compared(pair: Pair, wanted: loops.Trained, found: loops.Trained) -> Mapping[str, str]:
    """Compare what was trained with a loop: bit by bit, or how near."""
    names = wanted[1].keys() & found[1].keys()
    if names != wanted[1].keys():
        return {"status": "wrong", "detail": f"lacks {sorted(wanted[1].keys() - names)}"}
    tensors = {name: (wanted[1][name], found[1][name]) for name in sorted(names)}
    losses = [torch.tensor(each[0], dtype=torch.float64) for each in (wanted, found)]
    said_alike = _off(*losses) <= LAST_PLACE  # a loop adds them up in a way of its own
    if said_alike and all(torch.equal(*two) for two in tensors.values()):
        return {"status": "bitwise", "detail": ""}
    far = max((_off(*two), name) for name, two in {**tensors, "losses": losses}.items())
    near = NEAR_IN_GROUPS if "M" in pair.name and "T" in pair.name else NEAR
    status = "reference" if far[0] <= near else "wrong"
    return {"status": status, "detail": f"{far[0]:.0e} off the loop in {far[1]}"}


def whole(plan: Plan, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join what members of a tensor group hold a part of each."""
    found, parts = dict(tensors), defaultdict(list)
    for shard in plan.sharded.shards if plan.placement.tensor is not None else ():
        parts[shard.param].append(shard)
    for name, own in parts.items():
        held = [tensors[part_name(name, shard.member)] for shard in own]
        lengths = [shard.stop - shard.start for shard in own]
        found[name] = joined(held, own[0].dim, own[0].inner, lengths)
    return found


def _off(wanted: Tensor, found: Tensor) -> float:
    scale = float(wanted.double().abs().max()) or 1.0
    return float((wanted.double() - found.double()).abs().max()) / scale


def write_cluster(folder: Path, count: int) -> Path:
    """Write a cluster of alike devices on one host, each with a store."""
    room = folder / "stores"
    room.mkdir(exist_ok=True)
    names = [f"d{i}" for i in range(count)]
    rates = {"memory": "1GiB", "flops": "60GFLOP/s", "memory_bandwidth": "12GB/s"}
    devices = [{"name": name, "host": "localhost", "kind": "cpu", **rates} for name in names]
    disk = {"capacity": "8GiB", "bandwidth": "1GB/s"}
    stores = [
        {"name": f"disk-{name}", "device": name, "folder": str(room), **disk} for name in names
    ]
    links = {"default": {"bandwidth": "1GB/s", "latency": "50us"}}
    path = folder / f"cluster-{count}.json"
    path.write_text(json.dumps({"devices": devices, "links": links, "stores": stores}))
    return path
