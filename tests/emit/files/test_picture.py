"""The picture in a device file: the chain of devices in the order in which a micro-batch visits."""

from __future__ import annotations

import re
from itertools import groupby

import pytest

from tests.support import samples

WIDTH = 100


def chain(text: str) -> list[str]:
    """Return the devices of a file's picture; its own stands in brackets."""
    paragraph = text.split("\n\n")[1]
    return re.findall(r"\[?d\d+\]?(?= -->|     |\n|$)", paragraph)


@pytest.mark.parametrize(
    ("devices", "schedule", "expected"),
    [
        (2, "1f1b", ["d0", "[d1]"]),
        (2, "zb-v", ["d0", "[d1]", "d0"]),
        (4, "zb-v", ["d0", "[d1]", "d2", "d3", "d2", "[d1]", "d0"]),
        (2, "interleaved", ["d0", "[d1]", "d0", "[d1]"]),
    ],
)
def test_a_device_is_drawn_once_per_visit(devices: int, schedule: str, expected: list[str]) -> None:
    texts = samples.texts("gpt", "naive", devices, schedule, 4)
    assert chain(texts["device_d1.py"]) == expected


def test_a_long_chain_is_wrapped() -> None:
    plan = samples.plan("gpt", "scattered")
    text = samples.texts("gpt", "scattered")["device_d0.py"]
    visits = [name for name, _ in groupby(stage.device for stage in plan.stages.stages)]
    assert chain(text) == [f"[{name}]" if name == "d0" else name for name in visits]
    paragraph = text.split("\n\n")[1]
    assert len(paragraph.splitlines()) > 1
    assert all(len(line) <= WIDTH for line in paragraph.splitlines())
