"""A Hugging Face config.json -> the model it names, and a batch that the model takes.

No network is used, and no code but transformers' own. This file knows transformers' configurations
and classes; `hf_batch` makes the example batch.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.hf.batch import example_batch
from bigbrain_fx.frontend.location import HfLocation
from bigbrain_fx.frontend.translation.sources import where

# Where a configuration names no class: the first of these tasks that has one for its kind of model.
_TASKS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "MASKED_LM",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
)


def load_hf(at: HfLocation, seed: int) -> tuple[nn.Module, object]:
    """Build the model of a configuration, and a batch that it takes.

    Raises:
        InputError: transformers is missing or has no such class, or no batch can be made up.
    """
    transformers = _transformers()
    config = _config(transformers, at.path)
    kind = _class(transformers, config, at.path)
    _prepare(config, kind)
    torch.manual_seed(seed)
    with _errors(at.path, kind):
        model = _built(kind, config, at.dtype)
    with torch.device("cpu"):  # a batch has numbers, whatever the model is built on
        torch.manual_seed(seed)
        return model, example_batch(model, at)


def _transformers() -> Any:  # noqa: ANN401  # a module without type information
    """Import transformers, without access to the network."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    try:
        found = importlib.import_module("transformers")
        found.logging.set_verbosity_error()
        return found
    except ImportError as error:
        raise InputError(
            "Hugging Face models need transformers, which is not installed",
            code="BX2051",
            notes=(str(error),),
            help="pip install transformers",
        ) from error


def _config(transformers: Any, path: Path) -> Any:  # noqa: ANN401  # transformers' own class
    """Read config.json as transformers' class for its `model_type`."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path.name} is no JSON: {error}",
            code="BX2052",
            at=str(path),
            help="download it again",
        ) from error
    kind = fields.get("model_type") if isinstance(fields, Mapping) else None
    known = transformers.CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in known:
        raise _unknown_kind(kind, list(known.keys()), path)
    if fields.get("quantization_config"):
        raise InputError(
            "the configuration is of a quantized model, which cannot be trained as it is",
            code="BX2053",
            at=str(path),
            help="take the configuration (and checkpoint) of the model it was made from",
        )
    try:
        return known[kind].from_dict(fields)
    except Exception as error:  # whatever its validation raises
        raise InputError(
            f"transformers cannot read this {kind} configuration: {_first_line(error)}",
            code="BX2054",
            at=str(path),
            help="compare it with the defaults of its class in transformers",
        ) from error


def _unknown_kind(kind: object, known: list[str], path: Path) -> InputError:
    close = difflib.get_close_matches(str(kind), known, n=1, cutoff=0.6)
    return InputError(
        f'expected "model_type" of a model that transformers has, found {kind!r}',
        code="BX2055",
        at=str(path),
        notes=("code that comes with a checkpoint is never run",),
        help=f"did you mean {close[0]!r}?" if close else "write a model.py that builds the model",
    )


def _class(transformers: Any, config: Any, path: Path) -> type[nn.Module]:  # noqa: ANN401
    """Return the class that `architectures` names; without one a class that trains, or the bare."""
    named = (getattr(config, "architectures", None) or [None])[0]
    found = named or next((n for n in _by_task(config) if hasattr(transformers, n)), None)
    if found is not None and hasattr(transformers, found):
        return cast("type[nn.Module]", getattr(transformers, found))
    if named is None and type(config) in transformers.MODEL_MAPPING:
        bare = transformers.MODEL_MAPPING[type(config)]
        return cast("type[nn.Module]", bare[0] if isinstance(bare, tuple) else bare)
    raise InputError(
        f"transformers {transformers.__version__} has no class {named!r}",
        code="BX2056",
        at=f"{path}: architectures",
        help="name a class of transformers there, leave `architectures` out for the usual one, or "
        "write a model.py that builds the model",
    )


def _by_task(config: Any) -> Iterator[str]:  # noqa: ANN401
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    for task in _TASKS:
        found = getattr(tables, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).get(config.model_type)
        if found is not None:
            yield found[0] if isinstance(found, tuple) else found


def _prepare(config: Any, kind: type[nn.Module]) -> None:  # noqa: ANN401
    """Set the options of training: no cache of keys and values, and rows without padding."""
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        if hasattr(part, "use_cache"):
            part.use_cache = False
    # a decoder that classifies needs to know padding to find each row's end
    if kind.__name__.endswith("ForSequenceClassification") and config.pad_token_id is None:
        config.pad_token_id = 0


def _built(kind: type[nn.Module], config: Any, dtype: str | None) -> nn.Module:  # noqa: ANN401
    """Build as `from_config` does: in the configuration's type unless another is chosen."""
    wanted = getattr(torch, dtype) if dtype else getattr(config, "dtype", None)
    make = getattr(kind, "_from_config", None)
    if make is None:
        return kind(config).to(wanted)
    return cast("nn.Module", make(config, **({"dtype": wanted} if wanted is not None else {})))


@contextlib.contextmanager
def _errors(path: Path, kind: type[nn.Module]) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except ImportError as error:
        raise InputError(
            f"{kind.__name__} needs a module that is not installed: {_first_line(error)}",
            code="BX2057",
            at=str(path),
            help="install it into this Python",
        ) from error
    except Exception as error:
        raise InputError(
            f"{kind.__name__} cannot be built from this configuration: {_first_line(error)}",
            code="BX2058",
            at=where(error) or str(path),
            help="mend the configuration, or write a model.py that builds the model",
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
