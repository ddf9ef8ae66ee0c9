"""Text with a unit -> number, and back: "24GiB", "10Gbit/s", "0.2ms", "312TFLOP/s".

This module knows units; it knows neither JSON nor what the numbers are for.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Context, Decimal

_AMOUNT = re.compile(r"(?P<sign>[+-]?)(?P<number>[0-9]{1,400}(?:\.[0-9]{1,400})?)[ ]?(?P<unit>.*)")
_BITS = re.compile(r"([kKMGT]?)(?:b|[bB]its?)(?:/s|ps|/sec)")
_MAX_LENGTH = 1000  # a text longer than this is no quantity, and need not be scanned
_MAX_VALUE = Decimal(10) ** 30
_MAX_USD = 1e12
_OURS = Context(prec=28)  # a model file may have set the process's own

_DECIMAL = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}


class BadValueError(ValueError):
    """Report what is wrong with one value of the file; the caller adds the place.

    Args:
        what: one sentence: what was expected and what was found.
        help: one edit that mends it.
        code: of the place that raises it.
    """

    def __init__(self, what: str, help: str, *, code: str) -> None:
        super().__init__(what)
        self.what = what
        self.help = help
        self.code = code


@dataclass(frozen=True)
class Quantity:
    """Read and describe one kind of amount.

    Attributes:
        noun: "an amount of memory"; used in messages.
        example: how one writes it.
        units: what one of each unit is, in the unit that `read` returns.
        may_be_zero: whether 0 is allowed (a latency), or must be positive.
    """

    noun: str
    example: str
    units: Mapping[str, Decimal]
    may_be_zero: bool = False

    @property
    def pattern(self) -> str:
        """Regular expression for JSON Schema (ECMA 262)."""
        units = "|".join(re.escape(unit).replace("\\-", "-") for unit in self.units)
        return rf"^[0-9]+(\.[0-9]+)? ?({units})$"

    def read(self, value: object) -> Decimal:
        """Turn "24GiB" into the exact number of base units.

        Raises:
            BadValueError: no text, no unit, an unknown unit, negative, zero or absurdly large.
        """
        if not isinstance(value, str):
            raise BadValueError(self._expected(value), self._help(value), code="BX1029")
        match = _AMOUNT.fullmatch(value.strip()) if len(value) <= _MAX_LENGTH else None
        if not match or match["unit"] not in self.units:
            raise BadValueError(
                self._expected(value), self._help(match["unit"] if match else value), code="BX1030"
            )
        amount = _OURS.multiply(Decimal(match["number"]), self.units[match["unit"]])
        if match["sign"] == "-" and amount:
            raise BadValueError(
                f"{self.noun} cannot be negative: {quoted(value)}",
                f'for example "{self.example}"',
                code="BX1031",
            )
        if not amount and not self.may_be_zero:
            raise BadValueError(
                f"{self.noun} must be more than zero: {quoted(value)}",
                f'for example "{self.example}"',
                code="BX1032",
            )
        if amount > _MAX_VALUE:
            raise BadValueError(
                f"{self.noun} is too large to be true: {quoted(value)}",
                f'for example "{self.example}"',
                code="BX1033",
            )
        return amount

    def _expected(self, value: object) -> str:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return f"expected {self.noun} with its unit, found the plain number {quoted(value)}"
        return f"expected {self.noun}, found {quoted(value)}"

    def _help(self, found: object) -> str:
        if isinstance(found, int | float) and not isinstance(found, bool):
            meant = f"{_plain(found)}{self._likely_unit(found)}"
            return f'write the unit: "{meant}", for example "{self.example}"'
        known = ", ".join(self.units)
        near = _meant(found, self.units) if isinstance(found, str) else ()
        hint = f"; did you mean {near[0]}?" if near else ""
        return f'for example "{self.example}" (units: {known}){hint}'

    def _likely_unit(self, found: float) -> str:
        """Return the unit of the example, or 1: what makes a plain number more like the example."""
        own, base = _unit_of(self.example), next(u for u, size in self.units.items() if size == 1)
        if not 0 < found < math.inf:
            return own
        usual = math.log(self.read(self.example))

        def unlikely(unit: str) -> float:
            return abs(math.log(found) + math.log(self.units[unit]) - usual)

        return min((own, base), key=unlikely)


def _plain(number: float) -> str:
    """Write a number as amounts are written: no exponent, no ".0"; of any number of digits."""
    if isinstance(number, int) or not math.isfinite(number):
        return quoted(number)
    return _digits(number, 0)


def _meant(found: str, units: Mapping[str, Decimal]) -> tuple[str, ...]:
    """Return the unit that was likely meant: Gbps are bits, however near it is to GB/s."""
    bits = _BITS.fullmatch(found)
    said = f"{bits[1].replace('K', 'k')}bit/s" if bits else re.sub("[\u00b5\u03bc]", "u", found)
    return (said,) if said in units else tuple(nearest(found, units))


def _unit_of(example: str) -> str:
    match = _AMOUNT.fullmatch(example)
    assert match is not None  # examples are ours
    return match["unit"]


def _decimal_units(suffix: str, prefixes: str) -> dict[str, Decimal]:
    return {f"{p}{suffix}": Decimal(10) ** _DECIMAL[p] for p in ["", *prefixes]}


_BYTES = {
    "B": Decimal(1),
    **{f"{p}B": Decimal(2) ** power for p, power in _BINARY.items()},
    **{f"{p}B": Decimal(10) ** _DECIMAL[p] for p in "kKMGT"},
}

MEMORY = Quantity("an amount of memory", "24GiB", _BYTES)
BANDWIDTH = Quantity(
    "a bandwidth",
    "10Gbit/s",
    {
        **{f"{unit}/s": size for unit, size in _BYTES.items()},
        **{unit: size / 8 for unit, size in _decimal_units("bit/s", "kMGT").items()},
    },
)
COMPUTE = Quantity("a compute rate", "60GFLOP/s", _decimal_units("FLOP/s", "MGTP"))
TIME = Quantity(
    "a time",
    "50us",
    {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6"), "ns": Decimal("1e-9")},
    may_be_zero=True,
)
DURATION = Quantity(
    "a duration",
    "4h",
    {"s": Decimal(1), "min": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)},
)


def memory_bytes(value: object) -> int:
    """Read "24GiB" or "80GB"; a fraction of a byte is dropped."""
    whole = int(MEMORY.read(value))
    if not whole:
        raise BadValueError(
            f"{MEMORY.noun} must be at least one byte: {quoted(value)}",
            'for example "24GiB"',
            code="BX1034",
        )
    return whole


def bytes_per_s(value: object) -> float:
    """Read "10Gbit/s" or "1GB/s" as bytes per second."""
    return float(BANDWIDTH.read(value))


def flops_per_s(value: object) -> float:
    """Read "312TFLOP/s" as floating point operations per second."""
    return float(COMPUTE.read(value))


def seconds(value: object) -> float:
    """Read "0.2ms" as seconds; zero is allowed."""
    return float(TIME.read(value))


def duration_s(value: object) -> float:
    """Read "4h", "10min" or "2d" as seconds."""
    return float(DURATION.read(value))


def usd(value: object) -> float | None:
    """Read a price: a plain number of US dollars, 0 or more; None stays None."""
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= float(str(value)) <= _MAX_USD:
        raise BadValueError(
            f"expected a number of US dollars, 0 or more, found {quoted(value)}",
            "for example 2.1, without a unit: the name of the field has it",
            code="BX1058",
        )
    return float(str(value))


def memory_text(count: int) -> str:
    """Write bytes so that `memory_bytes` reads the same number: 25769803776 -> "24GiB"."""
    for prefix in ("Ti", "Gi", "Mi", "Ki"):
        size = 2 ** _BINARY[prefix]
        if count % size == 0:
            return f"{count // size}{prefix}B"
    for prefix in "GM":  # datasheets count in decimal
        size = 10 ** _DECIMAL[prefix]
        if count % size == 0:
            return f"{count // size}{prefix}B"
    return f"{count}B"


def rate_text(per_s: float, unit: str) -> str:
    """Write a rate so that reading gives the same float: (6.13e10, "FLOP/s") -> "61.3GFLOP/s"."""
    prefixes = [(12, "T"), (9, "G"), (6, "M"), (0, "")]
    power, prefix = next((p for p in prefixes if per_s >= 10.0 ** p[0]), prefixes[-1])
    return f"{_digits(per_s, power)}{prefix}{unit}"


def time_text(time_s: float) -> str:
    """Write seconds so that `seconds` reads the same float: 5e-05 -> "50us"."""
    units = [(0, "s"), (-3, "ms"), (-6, "us"), (-9, "ns")]
    power, unit = next((u for u in units if time_s >= 10.0 ** u[0]), units[-1])
    return f"{_digits(time_s, power)}{unit}" if time_s else "0us"


def _digits(value: float, power: int) -> str:
    """Write value / 10**power exactly: Decimal shifts the point in the shortest text."""
    if not math.isfinite(value):
        raise BadValueError(
            f"{value} has no text with a unit", "use a finite number", code="BX1035"
        )
    shifted = _OURS.scaleb(Decimal(repr(float(value))), -power)
    return f"{_OURS.normalize(shifted):f}"


def quoted(value: object) -> str:
    """Write a value of the file as JSON, control characters escaped, cut to sixty characters."""
    match value:
        case dict():
            return "an object"
        case list():
            return "a list"
        case bool() | None:
            return {True: "true", False: "false", None: "null"}[value]
        case str():
            text = '"' + value.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'
        case _:
            text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]}..." + ('"' if text[0] == '"' else "")


def nearest(name: str, known: Mapping[str, object] | list[str]) -> tuple[str, ...]:
    """Return the known names that `name` may have meant, the nearest first."""
    lower: dict[str, str] = {}
    for candidate in known:
        lower.setdefault(candidate.lower(), candidate)
    found = difflib.get_close_matches(name[:100].lower(), list(lower), n=3, cutoff=0.5)
    return tuple(lower[match] for match in found)
