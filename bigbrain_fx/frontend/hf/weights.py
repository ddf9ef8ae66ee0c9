"""A checkpoint in the layout that transformers publishes -> one in the layout of its model classes.

transformers renames tensors and joins some (experts that are stored one by one) when it loads a
checkpoint. Its own table and operations are used here, a tensor of the model at a time. This file
knows transformers' loading; where that has no such table, nothing is changed.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.weights import Checkpoint, Stored, read_checkpoint, tensors_apart


@dataclass
class _Group:
    """Tensors of the checkpoint that one operation makes into tensors of the model."""

    converter: Any
    parts: list[tuple[Stored, str]] = field(default_factory=list)


def converted(model: nn.Module, checkpoint: Checkpoint, folder: Path) -> dict[str, Stored]:
    """Name a checkpoint's tensors as the model does; join tensors that the model has as one.

    Args:
        model: any; only models of transformers have a table.
        checkpoint: as published.
        folder: for joined tensors, a file for each operation.

    Returns:
        The place of each tensor, by the model's name, else by the checkpoint's.

    Raises:
        InputError: an operation fails.
    """
    transforms = _transforms(model)
    if not transforms:
        return dict(checkpoint.tensors)
    state = model.state_dict()
    found, groups = _sorted_out(transforms, checkpoint, model, state)
    for number, (name, group) in enumerate(groups.items()):
        path = folder / f"{number}.safetensors"
        found |= _joined(model, name, group, state[name], path)
    return found


def _sorted_out(
    transforms: Sequence[Any],
    checkpoint: Checkpoint,
    model: Any,  # noqa: ANN401  # transformers' own class
    state: Mapping[str, Tensor],
) -> tuple[dict[str, Stored], dict[str, _Group]]:
    """Separate renamed tensors from tensors that go through an operation."""
    loading = importlib.import_module("transformers.core_model_loading")
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    made_by = {pattern: c for c in converters for pattern in c.source_patterns}
    found: dict[str, Stored] = {}
    groups: dict[str, _Group] = {}
    for key in sorted(checkpoint.tensors, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(
            key, renamings, converters, model.base_model_prefix, state
        )
        if name not in state:
            found[key] = checkpoint.tensors[key]
        elif pattern is None:
            found[name] = checkpoint.tensors[key]
        else:
            group = groups.setdefault(name, _Group(copy.deepcopy(made_by[pattern])))
            group.parts.append((checkpoint.tensors[key], pattern))
    return found, groups


def _transforms(model: nn.Module) -> list[Any]:
    """Return transformers' table for a model of its own; older ones have none."""
    loaded = sys.modules.get("transformers")
    if loaded is None or not isinstance(model, loaded.PreTrainedModel):
        return []
    try:
        table = importlib.import_module("transformers.conversion_mapping")
    except ImportError:
        return []
    return list(table.get_model_conversion_mapping(model))


def _joined(
    model: Any,  # noqa: ANN401  # transformers' own class
    name: str,
    group: _Group,
    like: Tensor,
    path: Path,
) -> dict[str, Stored]:
    """Run one operation and keep its results on disk."""
    for stored, pattern in group.parts:
        with safe_open(stored.file, framework="pt") as file:
            tensor = file.get_tensor(stored.key).to(like.dtype)
        group.converter.add_tensor(name, stored.key, pattern, tensor)
    try:
        made: Mapping[str, Any] = group.converter.convert(name, model=model, config=model.config)
    except Exception as error:
        first = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise InputError(
            f"transformers cannot make {name!r} of this checkpoint: {first}",
            code="BX2059",
            at=str(group.parts[0][0].file),
            help="load it with from_pretrained and save it again with save_pretrained",
        ) from error
    tensors = {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
    save_file(tensors_apart(tensors), path)
    return dict(read_checkpoint(path).tensors)
