"""Bundles of tensor groups have the bits of a reference that runs members in lockstep."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import pytest

from bigbrain_fx.core import BackwardWeight, Cluster
from bigbrain_fx.emit import bundle_texts
from bigbrain_fx.plan import Plan, part_channels
from bigbrain_fx.plan.tensor.messages import pieces
from tests.plan.test_offloading import with_stores
from tests.support.bundles import uneven
from tests.support.training import (
    AXES,
    BFLOAT16,
    FLAT,
    HEADS,
    PAGES,
    ROWS,
    SCALED,
    SHARED,
    WIDE,
    Table,
    cases,
    equal,
    require_bits,
)
from tests.verification.test_members_planned import PINS

pytestmark = [
    pytest.mark.usefixtures("one_thread", "small_buckets"),
    pytest.mark.filterwarnings("ignore:Detected call of"),
]


def stored(devices: int) -> Cluster:
    """Return devices with stores, each slower than the one before it."""
    found = with_stores(equal(devices))
    stores = (
        replace(store, folder=tempfile.gettempdir(), bytes_per_s=store.bytes_per_s / (1 + i))
        for i, store in enumerate(found.stores)
    )
    return replace(found, stores=tuple(stores))


# --------------------------------------------------------------------------- facts of plans


def every_layer(plan: Plan) -> bool:
    parts = {shard.param for shard in plan.sharded.shards}
    wanted = {"embed.weight", "head.weight", "norm.0.qkv.weight", "blocks.0.up.weight"}
    return wanted <= parts and not len(plan.stages.stages) % len(plan.stages.devices)


def replicated(plan: Plan) -> bool:
    return plan.stages.replicas == 2 and plan.stages.members in (2, 3)


def sums_in_pieces(plan: Plan) -> bool:
    """The reference adds whole tensors; members add a piece each, of unequal lengths for three."""
    sent = {part.numel for part in part_channels(plan) if part.sender == "d0"}
    return {*pieces(128 * 160, plan.stages.members)} <= sent and 128 * 160 not in sent


def pieces_of_some(plan: Plan) -> bool:
    """Of 128 rows, 110 and few: other pieces, and some of a tensor that would not be cut."""
    return len({part.numel for part in part_channels(plan)}) > 1


def in_sixteen_bits(plan: Plan) -> bool:
    cast = "dtype=torch.bfloat16, cache_enabled=False):" in bundle_texts(plan)["device_d0.py"]
    return cast and {part.dtype for part in part_channels(plan)} == {"bfloat16", "float32"}


def weights_wait(plan: Plan) -> bool:
    """Members' sums are of the backward that makes gradients of inputs; no weight's has one."""
    waits = [i for p in plan.programs for i in p.instructions if isinstance(i, BackwardWeight)]
    deferring = {*plan.stages.deferring}
    return bool(deferring) and {wait.stage for wait in waits} == deferring


def alike_again(plan: Plan) -> bool:
    first, *others = [stage.again for stage in plan.stages.stages]
    return bool(first) and {first} == {*others} and "again(" in bundle_texts(plan)["device_d0.py"]


def sequences(plan: Plan) -> bool:
    assert plan.placement.tensor is not None
    text = "\n".join(bundle_texts(plan).values())
    is_sent = "reduce_scatter(" in text and "gather_to_group(" in text
    return is_sent and "sequence" in {axis.kind for axis in plan.placement.tensor.axes}


def in_stores(plan: Plan) -> bool:
    return all(entry.stored_bytes for entry in plan.forecast.devices)


# --------------------------------------------------------------------------- model files

HEADS_WITH_NORMS = HEADS.replace(
    "class Net(", ROWS.format(init="self.norm = nn.BatchNorm1d(16)", forward=FLAT)
).replace("nn.LayerNorm(16))", "Rows())")
TWO = {"replicas": 2}
MICRO, TREE = {"sum_order": "micro"}, {"sum_order": "tree"}
OF_TWO = {"tensor": 2, "micro_batches": 4}
OF_THREE = {"tensor": 3, "micro_batches": 2}
BOTH = {"offload": ("activations", "state")}
TABLES: dict[str, Table] = {
    "groups": Table(
        HEADS,
        [
            (2, {}),
            (4, {"schedule": "gpipe"}),
            (3, {"tensor": 3, "tensor_shares": (2, 1, 1)}),
            (4, {"tensor_shares": (3, 1)}),
            (4, {"tensor_shares": (3, 1), "pins": PINS}),
        ],
        every_layer,
        OF_TWO,
        steps=2,
    ),
    "in pieces": Table(
        WIDE,
        [(3, {}), (4, {"tensor": 4, "tensor_shares": (2, 1, 1, 2)})],
        sums_in_pieces,
        OF_THREE,
    ),
    "bfloat16": Table(
        HEADS + BFLOAT16,
        [(4, {"tensor_shares": (3, 1)}), (4, {**TWO, **MICRO, "recompute": "all"})],
        in_sixteen_bits,
        OF_TWO,
    ),
    "weights wait": Table(
        HEADS,
        [
            (4, {"schedule": "zb-h1", "tensor_shares": (3, 1)}),
            (4, {"schedule": "1f1b", "defer": (1,)}),
            (8, {"schedule": "zb-h1", **TWO}),
            (4, {"schedule": "zb-v"}),
            (4, {"schedule": "dualpipe-v"}),
            (4, {"schedule": "auto"}),
            (8, {"schedule": "zb-h1", **TWO, **TREE, "zero_stage": 2}),
        ],
        weights_wait,
        OF_TWO,
    ),
    "ops again": Table(
        HEADS, [(2, {"recompute": "ops", "tensor_shares": (3, 1)})], alike_again, OF_TWO
    ),
    "replicas": Table(
        HEADS_WITH_NORMS,
        [
            (4, {**TREE, "zero_stage": 3, "recompute": "all"}),
            (4, {**MICRO, "tensor_shares": (3, 1)}),
            (4, {}),
            (8, {"zero_stage": 1, "recompute": (0, 2)}),
            (8, {**MICRO, "zero_stage": 2, "schedule": "list"}),
            (6, {"tensor": 3, "replica_shares": (3, 1)}),
        ],
        replicated,
        {**OF_TWO, **TWO},
        steps=2,
    ),
    "sequence": Table(
        HEADS,
        [
            (2, {"tensor_shares": (3, 1)}),
            (3, {"tensor": 3, "recompute": "all"}),
            (4, {"schedule": "zb-h1"}),
            (6, {"schedule": "zb-h1", "tensor": 3}),
            (4, {**TWO, **MICRO, "zero_stage": 1}),
        ],
        sequences,
        {**OF_TWO, **AXES},
    ),
    "few rows": Table(
        uneven(SHARED),
        [
            (2, {"tensor_shares": (3, 1)}),
            (4, {"schedule": "zb-h1"}),
            (4, {**TWO, **MICRO, "recompute": "all"}),
        ],
        common=OF_TWO,
        steps=4,
    ),
    "few rows in pieces": Table(
        uneven(WIDE, (256, 219, 3, 1)), [(3, {})], pieces_of_some, OF_THREE, steps=4
    ),
    "loss scale": Table(
        SCALED,
        [(2, {}), (4, {"tensor_shares": (3, 1), **TWO, "zero_stage": 1})],
        common=OF_TWO,
        steps=6,
    ),
    "stores": Table(
        PAGES,
        [
            (2, {**BOTH, "tensor_shares": (3, 1)}),
            (4, {**BOTH, "recompute": "all"}),
            (4, {"offload": ("state",), "schedule": "zb-h1"}),
            (4, {**BOTH, **TWO, "zero_stage": 1}),
        ],
        in_stores,
        OF_TWO,
        stored,
    ),
}
CASES = cases(TABLES)


@pytest.mark.gate(
    "few rows in pieces: 3 ",
    "replicas: 4 sum_order=tree zero_stage=3 recompute=all",
)
@pytest.mark.parametrize("case", CASES)
def test_a_group_has_the_bits_of_its_members(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_bits(CASES[case], monkeypatch)
