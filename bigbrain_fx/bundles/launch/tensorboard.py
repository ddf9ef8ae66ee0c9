"""Scalars as a TensorBoard event file, without TensorBoard: records of a protobuf, each checked.

    record   length (8 bytes), masked CRC32C of it, the event, masked CRC32C of that
    event    1: wall time (double), 2: step (varint), 3: version (text), 5: summary
    summary  1: value: 1: tag (text), 2: number (float)

Source: tensorflow/core/util/event.proto and core/lib/io/record_writer.cc.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

VERSION = b"brain.Event:2"
_POLYNOMIAL = 0x82F63B78  # CRC32C (Castagnoli), bits reversed
_MASK = 0xA282EAD8


class EventFile:
    """An event file in a folder, which TensorBoard finds there.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{os.uname().nodename}.{os.getpid()}"
        self.file = (folder / name).open("ab")
        self._write(_bytes(3, VERSION))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of one step, by tag."""
        found = (_bytes(1, _bytes(1, t.encode()) + _float(2, v)) for t, v in values.items())
        self._write(_varint(2 << 3) + _varint(step) + _bytes(5, b"".join(found)))

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _write(self, fields: bytes) -> None:
        event = _varint(1 << 3 | 1) + struct.pack("<d", time.time()) + fields
        length = struct.pack("<Q", len(event))
        self.file.write(length + _checked(length) + event + _checked(event))
        self.file.flush()


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _checked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def _table() -> tuple[int, ...]:
    def entry(number: int) -> int:
        for _ in range(8):
            number = number >> 1 ^ (_POLYNOMIAL if number & 1 else 0)
        return number

    return tuple(map(entry, range(256)))


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Return the CRC32C of some bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
