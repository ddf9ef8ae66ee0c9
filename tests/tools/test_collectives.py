"""Alpha-beta fits, and the tool that fits published collectives."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings, strategies as st

from bigbrain_fx.core import Link
from bigbrain_fx.errors import InputError
from tests.support.examples import examples
from tools.alpha_beta import (
    AlphaBeta,
    fit_alpha_beta,
    fit_pieces,
    relative_errors,
)
from tools.collectives import FILE, VARIABLE, Topology, fit_series, main, read_series, summary

PUBLISHED = Path(os.environ.get(VARIABLE, "/work/shared/data/published"))
SIZES = [float(2**i) for i in range(4, 27)]
TEXT = """Content of prof_database.pkl file:

Key: ('default', (2, 4))
all_gather_cost_dict:
  (((0, 4), (1, 5), (2, 6), (3, 7)), 'f16'): [(0, 1e-05), (1, 1e-05), (2, 2e-05), (4, 4e-05), (8, 5e-05), (16, 6e-05), (32, 0.00012), (64, 0.0002)]
  (((0, 1, 2, 3, 4, 5, 6, 7),), 'f32'): [(0, inf), (1, inf), (2, inf)]

all_reduce_cost_dict:
  (((0,), (1,)), 'f32'): [(0, 1e-05), (1, 2e-05), (2, 3e-05)]

available_memory_per_device:
  14957700710

dot_cost_dict:
  ((), 'f16'): [(0, 1.6e-05), (4194304, 2.9e-05)]
"""  # noqa: E501


def test_a_line_is_found_exactly() -> None:
    truth = AlphaBeta(2e-5, 1e-9)
    found = fit_alpha_beta(SIZES, [truth.seconds(n) for n in SIZES])
    assert found.latency_s == pytest.approx(2e-5)
    assert found.s_per_byte == pytest.approx(1e-9)
    assert found.link == Link(found.latency_s, 1 / found.s_per_byte)


def test_a_few_disturbed_messages_do_not_bend_it() -> None:
    truth = AlphaBeta(2e-5, 1e-9)
    seconds = [truth.seconds(n) * (30.0 if i % 5 == 0 else 1.0) for i, n in enumerate(SIZES)]
    found = fit_alpha_beta(SIZES, seconds)
    assert found.latency_s == pytest.approx(2e-5)
    assert found.s_per_byte == pytest.approx(1e-9)


def test_neither_is_below_zero() -> None:
    falling = fit_alpha_beta([1, 10, 100], [3.0, 2.0, 1.0])
    assert (falling.latency_s, falling.s_per_byte) == (1.0, 0.0)  # errors 2/3, 1/2 and 0
    assert falling.link.bytes_per_s == math.inf
    steep = fit_alpha_beta([10, 100], [1.0, 20.0])  # a line through both would start below zero
    assert steep.latency_s == 0.0


@settings(deadline=None, derandomize=True, max_examples=examples(40))
@given(
    seconds=st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=9),
    latency_s=st.floats(0.0, 1.0),
    s_per_byte=st.floats(0.0, 1e-2),
)
def test_no_other_line_has_less_error(
    seconds: list[float], latency_s: float, s_per_byte: float
) -> None:
    sizes = [float(3**i) for i in range(len(seconds))]
    best = sum(relative_errors(fit_alpha_beta(sizes, seconds), sizes, seconds))
    other = sum(relative_errors(AlphaBeta(latency_s, s_per_byte), sizes, seconds))
    assert best <= other * (1 + 1e-9)


def test_a_switch_of_protocol_is_found_by_pieces() -> None:
    eager, rendezvous = AlphaBeta(1e-5, 4e-9), AlphaBeta(9e-5, 1e-9)
    seconds = [(eager if n < 2**14 else rendezvous).seconds(n) for n in SIZES]
    one, two = fit_alpha_beta(SIZES, seconds), fit_pieces(SIZES, seconds)
    assert max(relative_errors(two, SIZES, seconds)) < 1e-9
    assert max(relative_errors(one, SIZES, seconds)) > 0.2
    (end,) = two.ends_bytes
    assert 2**13 < end <= 2**14
    shuffled = fit_pieces(SIZES[::-1], seconds[::-1])
    assert shuffled == two
    assert fit_pieces(SIZES, seconds, most=1).pieces == (one,)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(InputError, match="at least two sizes"):
        fit_alpha_beta([5, 5], [1.0, 2.0])
    with pytest.raises(InputError, match=r"found 8\.0 bytes in inf s"):
        fit_alpha_beta([4, 8], [1.0, math.inf])
    with pytest.raises(InputError, match="positive time"):
        fit_pieces([4, 8], [1.0, 0.0])


# --------------------------------------------------------------------------- the published text


def test_series_are_read_with_who_talks_to_whom() -> None:
    first, whole, alone = read_series(TEXT)
    assert first.collective == "all-gather"
    assert first.topology == Topology((2, 4), groups=4, ranks=2, hosts=2, stride=4)
    assert first.sizes_bytes == (0, 2, 4, 8, 16, 32, 64, 128)
    assert whole.topology == Topology((2, 4), groups=1, ranks=8, hosts=2, stride=1)
    assert (alone.collective, alone.topology.ranks) == ("all-reduce", 1)


def test_what_is_no_measured_message_is_left_out() -> None:
    first, whole, alone = read_series(TEXT)
    # nothing is sent; nothing; moved; moved; measured; measured; moved; measured
    assert first.is_measured == (False, False, False, False, True, True, False, True)
    assert not any(whole.is_measured)
    assert alone.is_measured == (False, True, True)


def test_a_damaged_line_is_named() -> None:
    with pytest.raises(InputError, match="expected") as caught:
        list(read_series(TEXT.replace("'f16'): [(0", "'f16': [(0", 1)))
    assert caught.value.at == "line 5"


def run(*words: str) -> Result:
    return CliRunner().invoke(main, words, env={VARIABLE: ""})


def test_without_data_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = run("--data", str(tmp_path))
    assert done.exit_code == 0
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert VARIABLE in done.stderr


@pytest.mark.skipif(not (PUBLISHED / FILE).is_file(), reason=f"no {FILE}")
def test_the_whole_file_is_read() -> None:
    found = list(read_series((PUBLISHED / FILE).read_text()))
    assert len(found) == 248
    assert sum(len(series.seconds) for series in found) == 8060
    assert len({series.topology for series in found}) == 31
    fits = [fit_series(series, 2) for series in found[:4]]
    assert 0.0 < summary(fits)["mape"] < summary(fits)["worst"]


@pytest.mark.skipif(not (PUBLISHED / FILE).is_file(), reason=f"no {FILE}")
def test_json_ends_with_the_summary(tmp_path: Path) -> None:
    text = (PUBLISHED / FILE).read_text().split("Key: ")
    few = tmp_path / FILE
    few.write_text("Key: " + text[-1])  # one device
    lines = [
        json.loads(line) for line in run("--data", str(tmp_path), "--json").stdout.splitlines()
    ]
    assert [set(line) == {"summary"} for line in lines] == [False] * 8 + [True]
    total = lines[-1]["summary"]
    assert total["read_series"] == total["series"] == 8
    assert total["points"] == 260
    assert set(total["by_collective"]) == {line["collective"] for line in lines[:-1]}
    plain = run("--data", str(few))
    assert "1x1: 1 x 1 (alone)" in plain.stdout
