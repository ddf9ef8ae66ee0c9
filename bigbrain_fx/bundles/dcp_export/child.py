"""The child process of an export for torch.distributed.checkpoint: two safetensors files -> one.

Run as `python -m bigbrain_fx.bundles.dcp_export.child '{"model": ..., "folder": ...}'`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from bigbrain_fx.errors import os_error_as
from bigbrain_fx.frontend import Replies
from bigbrain_fx.runtime import decoded


def main() -> None:
    """Write as asked on the command line; report what came of it."""
    wanted, replies = json.loads(sys.argv.pop()), Replies()
    warnings.simplefilter("ignore")

    def work() -> Mapping[str, object]:
        return {"tensors": write(**{name: Path(path) for name, path in wanted.items()})}

    replies.reply(work)


def write(model: Path, folder: Path, optimizer: Path | None = None) -> int:
    """Write a checkpoint; return how many tensors the model has.

    Raises:
        InputError: the disk is full.
    """
    tensors = load_file(model)
    state: dict[str, Any] = {"model": tensors}
    if optimizer is not None:
        state |= _training(optimizer)
    help_ = "free some space, or give another --dcp"
    with os_error_as(f"cannot write {folder}", code="BX3027", at=folder, help=help_):
        save(state, storage_writer=_ManyNames(folder, _other_names(state)), no_dist=True)
    return len(tensors)


def _training(path: Path) -> dict[str, Any]:
    """Return the optimizer's state as `get_optimizer_state_dict` has it, nested and flattened."""
    with safe_open(str(path), framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
    tensors = load_file(path)
    own = facts["optimizer"]
    state: dict[str, dict[str, Any]] = {
        name: {key: decoded(value) for key, value in entry.items()}
        for name, entry in own["scalars"].items()
    }
    for full, tensor in tensors.items():
        _, key, name = full.split(":", 2)
        state[name][key] = tensor
    groups: list[dict[str, Any]] = [_group(entry) for entry in own["hyper"]]
    for number, group in enumerate(groups):
        group["params"] = [name for name, n in own["of"].items() if n == number]
    return {"optimizer": {"state": state, "param_groups": groups}, "step": int(facts["step"])}


def _group(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters; a scheduler of plain PyTorch asks for the rate that it began with."""
    group = {key: decoded(value) for key, value in entry["group"].items()}
    return {"initial_lr": decoded(entry["base_lr"]), **group}


def _other_names(state: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return key -> keys under which the same is there, too, where nothing else has that name.

    The model's tensors without "model.", and hyperparameters by each parameter's name: so do
    torchtitan and `flatten_optimizer_state_dict` ask for them.
    """
    model = state["model"]
    names = {f"model.{name}": [name] for name in model if f"model.{name}" not in model}
    for number, group in enumerate(state.get("optimizer", {}).get("param_groups", ())):
        place = "optimizer.param_groups"
        for key in group.keys() - {"params"}:
            names[f"{place}.{number}.{key}"] = [f"{place}.{name}.{key}" for name in group["params"]]
    return names


class _ManyNames(FileSystemWriter):
    """Writes an index in which some entries have other names as well."""

    def __init__(self, folder: Path, names: Mapping[str, Sequence[str]]) -> None:
        super().__init__(folder)
        self._names = names

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        held = metadata.state_dict_metadata
        again = [
            replace(one, index=replace(one.index, fqn=name))
            for each in results
            for one in each
            for name in self._names.get(one.index.fqn, ())
            if name not in held
        ]
        for key, names in self._names.items():
            for name in names:
                held.setdefault(name, held[key])
        super().finish(metadata, [*results, again])


if __name__ == "__main__":
    main()
