"""What the emitter writes, byte for byte, for six models; `pytest --update-golden` rewrites it.

Left out: the plan's key and the forecast, which change with every change of an estimate.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from tests.support import samples

GOLDEN = Path(__file__).parents[2] / "golden"
CELLS = {
    "gpt": ("naive", 2, "1f1b", 4),
    "unet": ("naive", 3, "gpipe", 4),
    "encdec": ("naive", 2, "1f1b", 8),
    "llama": ("chain-dp", 2, "1f1b", 4),
    "digits": ("naive", 2, "zb-h1", 8),
    "moe": ("naive", 2, "1f1b", 2),
}


def steady(text: str) -> str:
    text = re.sub(r"plan=\"[0-9a-f]{16}\"", 'plan="0123456789abcdef"', text)
    return re.sub(r"\d+\.\d+ s \| \d+ MiB \|", "0.000 s | 0 MiB |", text)


@pytest.mark.parametrize("model", CELLS)
def test_golden(model: str, update_golden: bool) -> None:
    partitioner, devices, schedule, micro_batches = CELLS[model]
    texts = samples.texts(model, partitioner, devices, schedule, micro_batches)
    found = {name: steady(text) for name, text in texts.items()}
    if update_golden:
        write(GOLDEN / model, found)
    expected = {path.name: path.read_text() for path in sorted((GOLDEN / model).iterdir())}
    differing = [diff(name, expected, found) for name in sorted({*expected, *found})]
    assert not any(differing), "\n".join(["see --update-golden", *filter(None, differing)])


def write(folder: Path, found: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, text in found.items():
        (folder / name).write_text(text)


def diff(name: str, expected: dict[str, str], found: dict[str, str]) -> str:
    old, new = (texts.get(name, "").splitlines() for texts in (expected, found))
    return "\n".join(
        difflib.unified_diff(old, new, f"golden/{name}", f"emitted/{name}", lineterm="")
    )


def test_a_difference_is_shown() -> None:
    assert "-a\n+b" in diff("x", {"x": "a"}, {"x": "b"})
    assert diff("x", {"x": "a"}, {"x": "a"}) == ""


def test_what_is_left_out_is_nothing_else() -> None:
    text = 'plan="0f0f0f0f0f0f0f0f", seed=3\n| d0 | a | 0 | 44 | 0.010 s | 5 MiB |'
    assert steady(text) == 'plan="0123456789abcdef", seed=3\n| d0 | a | 0 | 44 | 0.000 s | 0 MiB |'
