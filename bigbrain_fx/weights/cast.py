"""Change the element type of raw tensor bytes as `tensor.to(dtype)` does, without torch.

This file knows bytes and numpy; it knows no files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FLOATS = ("float64", "float32", "float16", "bfloat16")


def can_cast(source: str, target: str) -> bool:
    """Whether bytes of one element type can become the other."""
    return source == target or (source in FLOATS and target in FLOATS)


def cast(data: bytes, source: str, target: str) -> bytes:
    """Return the bytes in another element type; both are in `FLOATS`, rounding is to nearest even.

    A float64 reaches 16 bits through float32, as in torch.
    """
    if source == target:
        return data
    import numpy as np  # most commands cast nothing

    numbers = _read(data, source)
    if target == "bfloat16":
        return _bfloat16(numbers.astype(np.float32)).tobytes()
    if target == "float16":
        numbers = numbers.astype(np.float32)
    with np.errstate(over="ignore"):  # too large for 16 bits: infinity, as in torch
        return numbers.astype(target).tobytes()


def _read(data: bytes, dtype: str) -> NDArray[np.floating]:
    import numpy as np

    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype)


def _bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Keep the upper half of each float32, rounded to nearest, ties to even."""
    import numpy as np

    bits = numbers.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)
