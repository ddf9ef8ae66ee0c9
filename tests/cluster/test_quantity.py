"""What a wrong unit's message says was meant: taken at its word, it is right."""

from __future__ import annotations

import decimal

import pytest

from bigbrain_fx.cluster.quantity import (
    BANDWIDTH,
    COMPUTE,
    MEMORY,
    TIME,
    BadValueError,
    Quantity,
    time_text,
)
from tests.support.messages import refused


@pytest.mark.parametrize(
    ("quantity", "written", "meant"),
    [
        (BANDWIDTH, "10Gbps", "Gbit/s"),
        (BANDWIDTH, "10 Gb/s", "Gbit/s"),
        (BANDWIDTH, "100Kbits/s", "kbit/s"),
        (BANDWIDTH, "10GBps", "GB/s"),
        (TIME, "50\u00b5s", "us"),
    ],
)
def test_bits_and_bytes_milli_and_mega_are_told_apart(
    quantity: Quantity, written: str, meant: str
) -> None:
    with refused("BX1030", BadValueError) as caught:
        quantity.read(written)
    assert caught.value.help.endswith(f"did you mean {meant}?")


@pytest.mark.parametrize(
    ("quantity", "number", "meant"),
    [
        (COMPUTE, 60, "60GFLOP/s"),
        (COMPUTE, 60e9, "60000000000FLOP/s"),
        (COMPUTE, 3.12e14, "312000000000000FLOP/s"),
        (MEMORY, 8 << 30, "8589934592B"),
        (MEMORY, 0.5, "0.5GiB"),
        (BANDWIDTH, 125_000_000, "125000000B/s"),
        (TIME, 5e-5, "0.00005s"),
        (TIME, 50, "50us"),
        (TIME, 0, "0us"),
    ],
)
def test_a_plain_number_is_taken_in_the_unit_that_makes_it_likely(
    quantity: Quantity, number: float, meant: str
) -> None:
    with refused("BX1029", BadValueError) as caught:
        quantity.read(number)
    assert f'write the unit: "{meant}", for' in caught.value.help
    quantity.read(meant)


@pytest.mark.parametrize("number", [10**500, -1, float("inf"), float("nan")])
def test_no_plain_number_is_too_odd_for_its_message(number: float) -> None:
    with refused("BX1029", BadValueError):
        MEMORY.read(number)


def test_a_context_of_the_users_changes_no_number() -> None:
    with decimal.localcontext(prec=2, rounding=decimal.ROUND_DOWN):
        assert TIME.read("123.456us") == decimal.Decimal("123.456e-6")
        assert time_text(0.000123456) == "123.456us"
