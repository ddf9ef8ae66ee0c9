"""Kernels that were timed on a device: read, written, and names and times that are none."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from bigbrain_fx.cluster import parse_cluster, to_json
from bigbrain_fx.core import KERNELS
from tests.support.messages import refused


def _text(kernels: Mapping[str, object]) -> str:
    return json.dumps({"devices": [{"name": "a", "preset": "l4", "kernels": kernels}]})


def test_timed_kernels_come_back_in_their_own_order() -> None:
    given = {KERNELS[3].name: "12ms", KERNELS[0].name: "3.2ms"}
    cluster = parse_cluster(_text(given), "x")
    found = cluster.devices[0].kernels
    assert [name for name, _ in found] == [KERNELS[0].name, KERNELS[3].name]
    assert [took_s for _, took_s in found] == pytest.approx([3.2e-3, 12e-3])
    assert parse_cluster(to_json(cluster), "y") == cluster


@pytest.mark.parametrize(
    ("kernels", "code"),
    [
        ({"linear-half-8192x4096x409": "4ms"}, "BX1049"),
        ({KERNELS[0].name: "0s"}, "BX1050"),
        ({KERNELS[0].name: "-1ms"}, "BX1031"),
        ({KERNELS[0].name: 0.004}, "BX1029"),
    ],
)
def test_what_is_no_timed_kernel_is_refused(kernels: dict[str, object], code: str) -> None:
    with refused(code):
        parse_cluster(_text(kernels), "x")
