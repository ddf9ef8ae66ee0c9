"""Checksums of bytes that change when one byte has changed, or changed places.

    | payload | zeros up to a whole word | checksum of all before it and of the length |

Words of 8 bytes are laid out as the rows of a table, and summed along its rows and its columns:

    w0 w1 w2 │ r0     What is hashed (BLAKE2b, 64 bits): the sums of the rows and of the columns,
    w3 w4 w5 │ r1     modulo 2^64, the words that fill no row, and the length. A table has 2 MiB at
    ─────────┘        most; a payload of more has several, one after another. One of less than
    c0 c1 c2   w6     4 KiB is hashed itself.

These changes always change the hashed numbers, and the checksum but for one chance in 2^64:

- one word that is another one (a flipped bit, a burst): the sum of its row differs by what the word
  does, which is not 0 modulo 2^64;
- two unequal words in each other's places: in different rows, each row's sum differs by their
  difference; in one row they are in different columns, and the same holds there;
- a bit set in one word and cleared in another, or any two changes that cancel each other: they
  are in different rows or in different columns, and in each there is then only one.

A rotation leaves the hashed numbers as they are only where it leaves every sum of a row and of a
column as it is. A row has an odd number of words (65 or 513), which the data's own rows seldom
have. No checksum that is shorter than the data can do this for every data; a plain sum does for
none.

Two sums cost twice what one does, and a twentieth of a CRC in software, so that every message can
have them. Bytes are in host memory.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

WORD = 8  # bytes
HASHED = 512  # words at most that are hashed themselves
TABLE = 1 << 18  # words at most: it stays in the processor's cache for the second sum
NARROW, WIDE = 65, 513  # words of a row
WIDE_FROM = 1 << 14  # words


def checksum(tensor: Tensor) -> str:
    """Return the checksum of a tensor's elements, row by row, in hexadecimal digits."""
    dense = tensor.detach().cpu().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    if flat.storage_offset() % WORD:
        flat = flat.clone()
    count, rest = divmod(flat.numel(), WORD)
    words = flat[: count * WORD].view(torch.int64)
    tail = ctypes.string_at(flat.data_ptr() + count * WORD, rest)
    return hashed(words, count, flat.numel(), tail).hex()


def hashed(words: Tensor, count: int, nbytes: int, tail: bytes = b"") -> bytes:
    """Return the checksum of so many words and a tail, of a payload of so many bytes."""
    state = hashlib.blake2b(digest_size=WORD)
    for start in range(0, count, TABLE):
        for part in _parts(words, start, min(count - start, TABLE)):
            state.update(part)
    state.update(tail + nbytes.to_bytes(WORD, "little"))
    return state.digest()


def _parts(words: Tensor, start: int, count: int) -> Iterator[bytes]:
    """Yield what is hashed of up to one table of words; few operations, for small messages."""
    address = words.data_ptr() + start * WORD
    if count <= HASHED:
        yield ctypes.string_at(address, count * WORD)
        return
    width = NARROW if count < WIDE_FROM else WIDE
    rows, rest = divmod(count, width)
    table = words.as_strided((rows, width), (width, 1), words.storage_offset() + start)
    for dim in (0, 1):
        sums = table.sum(dim)  # held while its bytes are read
        yield ctypes.string_at(sums.data_ptr(), sums.numel() * WORD)
    yield ctypes.string_at(address + rows * width * WORD, rest * WORD)
