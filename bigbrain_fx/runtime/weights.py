"""A device's own tensors, from its file in weights/ or straight from the checkpoint it refers to.

Nothing else is read: a process never holds what other devices hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn


class OwnWeights(Mapping[str, Tensor]):
    """The tensors of one device by the model's names; each is read when it is asked for.

    A tensor lies in `weights/<device>.safetensors`, or `weights/<device>.references.json` says in
    which file of the user's checkpoint it is, and under which key.
    """

    def __init__(self, folder: Path, device: str) -> None:
        own = folder / f"{device}.safetensors"
        with safe_open(own, framework="pt") as file:
            self._places = {name: (own, name) for name in file.keys()}  # noqa: SIM118  # no dict
        references = folder / f"{device}.references.json"
        if references.exists():
            for name, at in json.loads(references.read_text(encoding="utf-8")).items():
                self._places[name] = (Path(at["file"]), at["key"])

    def __getitem__(self, name: str) -> Tensor:
        path, key = self._places[name]
        if not path.exists():
            raise SystemExit(
                f"{name} is in {path}, which is not there: the bundle was split with "
                "--weights-by-reference; put the checkpoint back, or run `bigbrain-fx load`"
            )
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a module's state, one at a time, by their names in it.

    Raises:
        KeyError: a tensor is missing.
        RuntimeError: one has another shape.
    """
    for name, held in module.state_dict().items():
        if name not in tensors and name.endswith(".num_batches_tracked"):
            held.zero_()  # a counter of batch norms that inference does not read
            continue
        found = tensors[name]
        if found.shape != held.shape:
            raise RuntimeError(
                f"{name} should have the shape {tuple(held.shape)}, found {tuple(found.shape)}"
            )
        held.copy_(found)
