"""Batches of a model file that has none: its example, again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from .stream import BatchError


def example_batches(beside: str) -> Callable[[int], Iterator[dict[str, Tensor]]]:
    """Return `batches` of a model file that has none.

    Args:
        beside: a file of the bundle; example.safetensors is in the same folder.
    """
    return lambda _seed: _repeated(Path(beside).parent / "example.safetensors")


def _repeated(path: Path) -> Iterator[dict[str, Tensor]]:
    """Yield what a file holds without end.

    Raises:
        BatchError: it cannot be read.
    """
    try:
        if not path.is_file():  # a pipe would be waited for
            raise FileNotFoundError(f"{path} is no file")
        batch = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BatchError(
            f"{path} cannot be read ({error}): copy the bundle again", code="BX5172"
        ) from error
    while True:
        yield batch
