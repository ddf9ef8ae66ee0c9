"""What a wrong unit's message says was meant: taken at its word, it is right."""

from __future__ import annotations

import decimal

import pytest

from bigbrain_fx.cluster.quantity import BANDWIDTH, TIME, BadValueError, Quantity, time_text


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
def test_what_was_meant_is_not_eight_or_a_million_times_it(
    quantity: Quantity, written: str, meant: str
) -> None:
    with pytest.raises(BadValueError) as caught:
        quantity.read(written)
    assert caught.value.help.endswith(f"did you mean {meant}?")


def test_a_context_of_the_users_changes_no_number() -> None:
    with decimal.localcontext(prec=2, rounding=decimal.ROUND_DOWN):
        assert TIME.read("123.456us") == decimal.Decimal("123.456e-6")
        assert time_text(0.000123456) == "123.456us"
