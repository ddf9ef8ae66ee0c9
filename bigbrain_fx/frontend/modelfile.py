"""A user's model file -> a ModelFile: the module, its example batch and its other definitions.

The file is code and is run as code. This module knows the contract; it knows no tracing.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bigbrain_fx.errors import InputError, about_code
from bigbrain_fx.frontend.contract import functions_of, kept_whole, training_of
from bigbrain_fx.frontend.location import hf_location, is_hf, is_onnx, onnx_location, split_location
from bigbrain_fx.frontend.spelling import misspelt_names
from bigbrain_fx.frontend.tracing.blank import reserve, unmade
from bigbrain_fx.frontend.tracing.step import Loss, modes_kept, route
from bigbrain_fx.frontend.users_code import definition, errors_of, run_file, users_folder
from bigbrain_fx.runtime import left_alone

Example: TypeAlias = Literal["traced", "any", "unused"]


@dataclass(frozen=True)
class ModelFile:
    """Names that a model file defines; None for missing ones.

    Attributes:
        path: the file; of a Hugging Face model its config.json, or the ONNX file.
        name: the object that made the model ("model" unless the location names another).
        model: built under the given seed; without numbers when only shapes are wanted.
        example_batch: one mini-batch; dimension 0 is the batch.
        free: dimensions in which batches are shorter, by entry, and their names: see `lengths`.
        parts, whole_batch: number of parts that `micro` cuts a batch into, and the uncut example.
        numbers: entries of a batch that are numbers, and tensors of this type in the example.
    """

    path: Path
    name: str
    model: nn.Module
    example_batch: object
    loss: Loss | None = None
    batches: Callable[[int], Iterator[object]] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    lr_scale: Callable[[int], float] | None = None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    loss_weight: Callable[[object], object] | None = None
    micro: Callable[[Any, int], Any] | None = None
    parts: int = 1
    whole_batch: object = None
    clip_norm: float | None = None
    grad_scaler: dict[str, int | float] | None = None
    autocast: str | None = None
    drop_last: bool | None = None
    batch_dims: Mapping[str | int, int | str | None] = field(default_factory=dict)
    pad: Mapping[str | int, int | float] = field(default_factory=dict)
    lengths: tuple[int, ...] | None = None
    free: Mapping[tuple[str | int, ...], tuple[tuple[int, str], ...]] = field(default_factory=dict)
    leaves: tuple[str, ...] = ()
    numbers: Mapping[tuple[str | int, ...], str] = field(default_factory=dict)
    location: str = ""

    @property
    def is_data(self) -> bool:
        """Whether it is no file of Python: a Hugging Face configuration, an ONNX file, a module."""
        return not self.location or is_hf(self.location) or is_onnx(self.location)


def module_name(file: ModelFile) -> str:
    """Return the name under which the file was imported."""
    if file.is_data:
        return ""  # no module of the user's
    named = [n for n, m in sys.modules.items() if getattr(m, "__file__", None) == str(file.path)]
    return named[0] if named else file.path.stem


def load_model_file(
    location: str | Path,
    *,
    seed: int = 0,
    meta: bool = False,
    blank: bool = False,
    cache: int = 0,
    example: Example = "traced",
) -> ModelFile:
    """Run a model file, or read a Hugging Face configuration; build the model and a batch.

    Args:
        location: "model.py", "model.py:name", "hf:config.json", or "model.onnx".
        seed: given to `torch.manual_seed` before the file runs and before the model is built.
        meta: build the model from shapes alone: no tensor has numbers.
        blank: leave the parameters without numbers and build all else: weights come later.
        cache: rows of cached keys and values; the model then computes single positions.
        example: treatment of the example batch: taken apart, of any kind, or not built where the
            file has `batches`.

    Raises:
        InputError: the file cannot be used; names its line, and the candidates for the model.
        CaptureError: `cache`, and the model has no form of one position.
    """
    if cache:
        made = load_model_file(location, seed=seed, meta=meta, blank=blank)
        return _cached(made, cache, meta)
    if is_hf(location):
        return _of_hf(str(location), seed, meta, blank)
    if is_onnx(location):
        return _of_onnx(str(location), seed, blank)
    path, name = split_location(location)
    with users_folder(path.parent):
        with unmade() if blank else contextlib.nullcontext():
            module = run_file(path, seed)
        name = name or _only_model(module, path)
        with _building(meta, blank):
            model = _build(module, path, name, seed)
        is_lazy = not meta and not blank and has_lazy(model)
        batch = _example(module, path, seed, "any" if is_lazy and example == "unused" else example)
        if is_lazy:
            give_sizes(model, batch, getattr(module, "loss", None))
    _reserve(model, meta, blank)
    return ModelFile(
        path,
        name,
        model,
        batch,
        **cast("Mapping[str, Any]", training_of(module, path, model)),
        leaves=kept_whole(module, path),
        location=str(path) if name == "model" else f"{path}:{name}",
    )


def _cached(file: ModelFile, rows: int, meta: bool) -> ModelFile:
    from bigbrain_fx.frontend.cached.model import with_cache

    with users_folder(file.path.parent):
        model, batch = with_cache(
            file.model,
            file.example_batch,
            rows,
            loss=file.loss,
            autocast=file.autocast,
            batch_dims=file.batch_dims,
            tries=not meta,
        )
    return ModelFile(
        file.path, file.name, model, batch, autocast=file.autocast, location=file.location
    )


def _of_hf(location: str, seed: int, meta: bool, blank: bool) -> ModelFile:
    from bigbrain_fx.frontend.hf.model import load_hf

    at = hf_location(location)
    with _building(meta, blank):
        model, batch = load_hf(at, seed)
    _reserve(model, meta, blank)
    return ModelFile(at.path, "model", model, batch, location=str(at))


def _of_onnx(location: str, seed: int, blank: bool) -> ModelFile:
    from bigbrain_fx.frontend.onnx import example_inputs, load_onnx

    at = onnx_location(location)
    if blank:
        raise InputError(
            "an ONNX file holds its weights itself",
            code="BX2070",
            at=at.path.name,
            help="leave --weights out",
        )
    model = load_onnx(at.path)
    batch = example_inputs(model, at.batch or 8, at.seq or 16, seed)
    return ModelFile(at.path, "model", model, batch, location=str(at))


def _building(meta: bool, blank: bool) -> contextlib.AbstractContextManager[object]:
    """Return the context in which a model is built."""
    if meta:
        return torch.device("meta")
    return unmade() if blank else contextlib.nullcontext()


def _reserve(model: nn.Module, meta: bool, blank: bool) -> None:
    """Let tensors without numbers be CPU tensors: then the trace is that of the full model."""
    if (meta or blank) and not reserve(model) and blank:
        raise InputError(
            "this system grants no memory addresses without memory behind them",
            code="BX2071",
            notes=("vm.overcommit_memory is 2, or the address space is limited",),
            help="raise `ulimit -v`, or leave --weights out and use `bigbrain-fx load` afterwards",
        )


def _candidates(module: ModuleType) -> list[str]:
    """List candidates for the model: module classes and instances that the file itself defines."""
    found = []
    for name, value in vars(module).items():
        own_class = isinstance(value, type) and issubclass(value, nn.Module)
        if isinstance(value, nn.Module) or (own_class and value.__module__ == module.__name__):
            found.append(name)
    return sorted(found)


def _only_model(module: ModuleType, path: Path) -> str:
    """Choose `model`, else the one module that the file defines."""
    if hasattr(module, "model"):
        return "model"
    names = _candidates(module)
    if len(names) == 1:
        return names[0]
    if not names:
        raise InputError(
            f"{path.name} must define `model`, and defines no torch module at all",
            code="BX2072",
            at=path.name,
            notes=misspelt_names(path),
            help="add: def model() -> nn.Module: return MyModel()",
        )
    raise InputError(
        f"{path.name} defines no `model`, and {len(names)} modules could be meant",
        code="BX2073",
        at=path.name,
        notes=("candidates: " + ", ".join(f"{path.name}:{name}" for name in names),),
        help=f"say which: {path.name}:{names[-1]}, or add: def model() -> nn.Module",
    )


def _build(module: ModuleType, path: Path, name: str, seed: int) -> nn.Module:
    if not hasattr(module, name):
        names = ", ".join(f"{path.name}:{entry}" for entry in _candidates(module)) or "none"
        raise InputError(
            f"{path.name} defines no `{name}`",
            code="BX2074",
            at=path.name,
            notes=(f"candidates: {names}",),
            help="name one of the candidates, or leave the name out",
        )
    value = getattr(module, name)
    if isinstance(value, nn.Module):
        return value
    if not callable(value):
        raise _no_module(path, name, value, module)
    _check_arguments(value, path, name)
    torch.manual_seed(seed)
    is_on = torch.is_grad_enabled()
    with errors_of(path, f"{name}() failed", _call_first(path, name)):
        built = value()
    if not isinstance(built, nn.Module):
        raise _no_module(path, name, built, module)
    if is_on and not torch.is_grad_enabled():
        raise InputError(
            f"{name}() switches gradients off for all that comes after it",
            code="BX2103",
            at=definition(value, path),
            help=f"let it end within {name}(): with torch.no_grad(): ...",
        )
    return built


def _no_module(path: Path, name: str, found: object, module: ModuleType) -> InputError:
    names = ", ".join(f"{path.name}:{entry}" for entry in _candidates(module)) or "none"
    return InputError(
        f"`{name}` must be or return a torch.nn.Module, found {type(found).__name__}",
        code="BX2075",
        at=definition(getattr(module, name), path),
        notes=(f"candidates: {names}",),
        help=f"return the module from {name}()",
    )


def _check_arguments(value: Callable[..., object], path: Path, name: str) -> None:
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
    if needed:
        raise InputError(
            f"{name}({', '.join(needed)}) needs arguments, expected something to call without any",
            code="BX2076",
            at=definition(value, path),
            help=f"add: def model() -> nn.Module: return {name}(...)",
        )


def _call_first(path: Path, name: str) -> str:
    """Return the remedy of a function that fails: a command that calls it alone."""
    if not path.stem.isidentifier():
        return f"make {name}() run in plain PyTorch first"
    call = "next(iter({}.batches(0)))" if name == "batches" else f"{{}}.{name}()"
    return f'make `python -c "import {path.stem}; {call.format(path.stem)}"` run there first'


def _example(module: ModuleType, path: Path, seed: int, use: Example) -> object:
    if use == "unused" and hasattr(module, "batches"):
        return None
    name = "example_batch" if getattr(module, "example_batch", None) is not None else "batches"
    value = given = getattr(module, name, None)
    if given is None:
        raise InputError(
            f"{path.name} must define `example_batch` or `batches`",
            code="BX2077",
            at=path.name,
            help="add: def example_batch(): return one mini-batch as a dict or tuple of tensors; a "
            "training script itself can call bigbrain_fx.machine().train(model, loader, loss=loss, "
            "optimizer=optimizer) in place of its loop",
        )
    if callable(given):
        torch.manual_seed(seed)
        with left_alone(given), errors_of(path, f"{name}() failed", _call_first(path, name)):
            value = given() if name == "example_batch" else _first_batch(module, path, seed)
    if use == "traced" and not isinstance(value, Mapping | tuple | list | Tensor):
        with about_code():
            raise InputError(
                f"{name}() must give a dict or a tuple, found {type(value).__name__}",
                code="BX2078",
                at=definition(given, path),
                help='give {"x": ..., "y": ...} or (x, y)',
            )
    return value


def _first_batch(module: ModuleType, path: Path, seed: int) -> object:
    """Return the first of `batches`, the example where the file has no other."""
    batches = cast("Callable[[int], Iterable[object]]", functions_of(module, path)["batches"])
    return next(iter(batches(seed)), None)


# --------------------------------------------------------------------------- lazy modules


def has_lazy(model: nn.Module) -> bool:
    """Whether a parameter or buffer has no shape before a first forward."""
    return any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers()))


def give_sizes(model: nn.Module, batch: object, loss: object) -> None:
    """Run a model with lazy modules once on a batch; where that fails, it stays as it is.

    Args:
        model: with lazy modules.
        batch: the example batch.
        loss: the file's loss function, or None; it decides how a batch reaches forward.
    """
    with modes_kept(model), torch.no_grad():
        model.eval()
        try:
            route(model, batch, loss is not None).call(model, batch)
        except InputError:
            raise
        except Exception:
            return  # whoever needs the sizes names the module


# --------------------------------------------------------------------------- parts in eval mode

_SAID = 3  # names in a sentence
_MODES = (
    nn.modules.batchnorm._NormBase,
    nn.modules.dropout._DropoutNd,
    nn.RNNBase,
    nn.MultiheadAttention,
)


@contextlib.contextmanager
def eval_parts_kept(model: nn.Module) -> Iterator[None]:
    """Let `train` leave the parts in eval mode that are, of a caller's model that trains."""
    parts = [model.get_submodule(name) for name in _changed(model, all_parts=True)]
    for part in parts if model.training else ():
        vars(part)["train"] = stay
    try:
        yield
    finally:
        for part in parts:
            vars(part).pop("train", None)


def stay(_mode: bool = True) -> None:
    """Leave a part in the mode that it has, in place of its `train`; also in a bundle."""


def eval_note(model: nn.Module) -> str | None:
    """Say that a caller's model is trained in another mode than it is in, if that may matter."""
    if model.training or not _goes_by_mode(model):
        return None
    return (
        "the model is in eval mode, and the devices train it in training mode, as after "
        "model.train()"
    )


def eval_parts_note(model: nn.Module) -> str | None:
    """Name the parts that `model.train()` changes; None where there are none.

    A model that is in eval mode itself trains as a whole: `from_pretrained` returns such.
    """
    names = list(_changed(model)) if model.training else []
    if not names:
        return None
    others = f" and {len(names) - _SAID} others" if len(names) > _SAID else ""
    said = f"{', '.join(names[:_SAID])}{others}"
    return (
        f"{said}: made in eval mode, and trained in training mode, as after model.train() in a "
        "plain loop. To keep eval mode, let the class say so: def train(self, mode=True): return "
        "super().train(False)"
    )


def _changed(model: nn.Module, *, all_parts: bool = False) -> Iterator[str]:
    """Yield the outermost parts in eval mode that `model.train()` lets train, if it matters."""
    found = {name: part for name, part in model.named_modules() if not part.training}
    with modes_kept(model):
        model.train()
        trained = [name for name, part in found.items() if part.training]
    for name in trained:
        if name.rpartition(".")[0] not in trained and (all_parts or _goes_by_mode(found[name])):
            yield name


def _goes_by_mode(part: nn.Module) -> bool:
    """Whether a part may compute something else in training: a class of the user's may ask."""
    kinds = (type(each) for each in part.modules())
    return any(issubclass(kind, _MODES) or not _is_torchs(kind) for kind in kinds)


def _is_torchs(kind: type) -> bool:
    """Whether a class is one of torch's own."""
    return kind.__module__.partition(".")[0] == "torch"
