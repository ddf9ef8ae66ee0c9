"""What a model file prints is there once, though its model is run some dozens of times."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from bigbrain_fx.frontend.prints import ALIKE, Prints
from tests.support.command_line import MODEL, write_cluster, write_model

DEADLINE_S = 120.0


@pytest.fixture
def behind() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def _written(behind: io.TextIOWrapper) -> str:
    assert isinstance(behind.buffer, io.BytesIO)
    return behind.buffer.getvalue().decode()


def test_a_line_comes_once_and_lines_alike_a_few_times(behind: io.TextIOWrapper) -> None:
    prints = Prints(behind)
    for number in range(10):
        print("loss", file=prints)
        print("step", number, end="", file=prints)
        print(" of 10", file=prints)
    print("no end", end="", file=prints)
    prints.finish("model.py")
    steps = "".join(f"step {n} of 10\n" for n in range(1, ALIKE))
    left_out = 9 + 10 - ALIKE
    assert _written(behind) == (
        f"loss\nstep 0 of 10\n{steps}no endmodel.py printed {left_out} more lines like these\n"
    )


def test_prints_do_not_change_the_wrapped_stream(behind: io.TextIOWrapper) -> None:
    prints = Prints(behind)
    prints.reconfigure(line_buffering=True)  # as many files do with sys.stdout
    assert (prints.encoding, prints.buffer, prints.writable()) == ("utf-8", behind.buffer, True)


@pytest.mark.nightly
def test_a_split_prints_what_a_model_prints_once_and_all_of_stderr(tmp_path: Path) -> None:
    text = MODEL.replace(
        "    def forward(self, x):\n",
        "    def forward(self, x):\n        print('seen', tuple(x.shape))\n"
        "        print('beware', file=__import__('sys').stderr)\n",
    )
    assert text != MODEL
    model, cluster = write_model(tmp_path, text), write_cluster(tmp_path)
    words = ["split", str(model), "--devices", str(cluster), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "bigbrain_fx", *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert 1 <= done.stderr.count("seen (") <= ALIKE + 1  # one of them with a symbol for a size
    assert f"{model} printed " in done.stderr
    assert done.stderr.count("beware") > ALIKE + 1
