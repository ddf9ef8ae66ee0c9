"""The checksum of a stored tensor, as a bundle's own runtime makes it of what it has read.

`runtime/checksum.py` describes it and what it notices. This is the same without torch, a table of
words at a time, so that no tensor is ever whole in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bigbrain_fx.weights.stored import Stored
from bigbrain_fx.weights.write import pieces_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WORD = 8  # bytes; these five as in runtime/checksum.py
HASHED = 512
TABLE = 1 << 18
NARROW, WIDE = 65, 513
WIDE_FROM = 1 << 14


def checksum_of(stored: Stored) -> str:
    """Return the checksum of a tensor on the disk, in hexadecimal digits.

    Raises:
        OSError: the file is gone, or cut off.
    """
    import numpy as np  # most commands check nothing

    state = hashlib.blake2b(digest_size=WORD)
    tail = b""
    for data in pieces_of(stored, TABLE * WORD):
        count = len(data) // WORD
        tail = data[count * WORD :]
        for part in _parts(np.frombuffer(data, np.int64, count)):
            state.update(part.tobytes())
    state.update(tail + stored.size.to_bytes(WORD, "little"))
    return state.hexdigest()


def _parts(words: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    if len(words) <= HASHED:
        yield words
        return
    width = NARROW if len(words) < WIDE_FROM else WIDE
    end = len(words) // width * width
    table = words[:end].reshape(-1, width)
    yield table.sum(0)
    yield table.sum(1)
    yield words[end:]
