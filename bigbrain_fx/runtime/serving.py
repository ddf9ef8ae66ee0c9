"""Batches that come by a pipe and outputs that leave by another: devices of a server.

    server ──frame──▶ every device
    the device that collects ──frame──▶ server

A frame is its length (8 bytes, little-endian) and safetensors. The pipes are no standard ones: a
model file may print. The server handles clients, and joins rows of several requests to one batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from safetensors.torch import load, save
from torch import Tensor

from .stream import Spec

LENGTH_BYTES = 8
ENDLESS = 10**9  # batches: the server ends them


class ServedError(Exception):
    """Say that the server has closed its pipe: there are no more batches, for any device."""


@dataclass(frozen=True)
class SlotPipes:
    """The ends of both pipes; `speaks` on the device that collects the outputs."""

    source: int
    sink: int
    speaks: bool
    facts: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        text: str,
        speaks: bool,
        specs: Mapping[str, Spec],
        whole: Sequence[str],
        outputs: Mapping[str, int | None],
        rows: int,
    ) -> SlotPipes:
        """Read "5,6", two file descriptors; the rest is what a server must know of the bundle."""
        source, sink = (int(number) for number in text.split(","))
        inputs = {name: [dtype, list(shape)] for name, (dtype, shape) in specs.items()}
        facts = {"inputs": inputs, "whole": list(whole), "outputs": dict(outputs), "rows": rows}
        return cls(source, sink, speaks, facts)

    def batches(self, _seed: int) -> Iterator[dict[str, Tensor]]:
        """Yield the batches as they come; the first one is waited for once all devices are here."""
        if self.speaks:
            self._write(json.dumps(self.facts).encode())
        while True:
            yield load(self._read(int.from_bytes(self._read(LENGTH_BYTES), "little")))

    def answer(self, _number: int, _rows: int, outputs: Mapping[str, Tensor], _s: float) -> None:
        """Send a batch's outputs."""
        apart = {name: value.cpu().contiguous().clone() for name, value in outputs.items()}
        self._write(save(apart))

    def _read(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            piece = os.read(self.source, count - len(found))
            if not piece:
                raise ServedError
            found += piece
        return bytes(found)

    def _write(self, content: bytes) -> None:
        left = memoryview(len(content).to_bytes(LENGTH_BYTES, "little") + content)
        while left:
            left = left[os.write(self.sink, left) :]
