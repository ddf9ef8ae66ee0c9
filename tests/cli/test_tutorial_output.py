"""What the tutorial shows of the starter model is what the commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bigbrain_fx.cli.templates import CLUSTER, is_made_up, write_starter
from bigbrain_fx.cluster import parse_cluster
from tests.support.command_line import call

PAGE = Path(__file__).resolve().parents[2] / "docs/tutorials/first-split.md"


def rounded(text: str) -> list[list[str]]:
    """Return the words of each line, with decimals of a forecast left out."""
    return [re.sub(r"\d+\.\d+", "#", line).split() for line in text.strip().splitlines()]


def shown_after(command: str) -> str:
    """Return the first block of output below a command of the page."""
    text = PAGE.read_text(encoding="utf-8")
    after = text[text.index(f"```sh\nbigbrain-fx {command}") :]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", after, re.MULTILINE | re.DOTALL)
    return next(block for language, block in blocks if not language)


def test_the_forecast_of_the_starter_is_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_starter(".")
    done = call("estimate", "model.py", "--devices", "cluster.json")
    assert done.code == 0, done.err
    assert rounded(done.out) == rounded(shown_after("estimate"))


def test_init_says_that_its_rates_are_made_up(tmp_path: Path) -> None:
    done = call("init", tmp_path)
    assert "bigbrain-fx doctor --write cluster.json" in done.err
    (tmp_path / "model.py").unlink()
    assert "bigbrain-fx doctor" not in call("init", tmp_path).err  # its cluster.json stays


@pytest.mark.parametrize(
    ("old", "new", "made_up"),
    [
        ("An example", "Of this machine", True),  # a comment measures nothing
        ('"flops": "60GFLOP/s"', '"flops": "61GFLOP/s"', False),
        ('"latency": "50us"', '"latency": "51us"', False),
    ],
)
def test_the_example_is_known_by_its_rates(old: str, new: str, made_up: bool) -> None:
    assert old in CLUSTER
    cluster = parse_cluster(CLUSTER.replace(old, new), "cluster.json")
    assert is_made_up(cluster) == made_up
