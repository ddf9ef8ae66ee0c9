"""A user's model file -> a ModelFile: the module, its example batch and what else the file defines.

The file is code and is run as code. This room's file knows the contract; it knows no tracing.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.location import hf_location, is_hf, is_onnx, onnx_location, split_location
from bigbrain_fx.frontend.tracing.blank import reserve, unmade
from bigbrain_fx.frontend.tracing.step import Loss
from bigbrain_fx.frontend.translation.sources import where

_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class ModelFile:
    """What a model file defines; None for what it leaves out.

    Attributes:
        path: the file; of a Hugging Face model its config.json, or the ONNX file.
        name: the object that made the model ("model" unless the user said otherwise).
        model: built under the given seed; without numbers when only shapes are wanted.
        example_batch: one mini-batch; dimension 0 is the batch.
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
    clip_norm: float | None = None
    grad_scaler: dict[str, int | float] | None = None
    autocast: str | None = None
    drop_last: bool | None = None
    batch_dims: Mapping[str | int, int | None] = field(default_factory=dict)
    pad: Mapping[str | int, int | float] = field(default_factory=dict)
    leaves: tuple[str, ...] = ()
    location: str = ""

    @property
    def is_data(self) -> bool:
        """Whether it is no Python: a Hugging Face configuration, an ONNX file."""
        return is_hf(self.location) or is_onnx(self.location)


def load_model_file(
    location: str | Path,
    *,
    seed: int = 0,
    meta: bool = False,
    blank: bool = False,
    cache: int = 0,
) -> ModelFile:
    """Run a model file, or read a Hugging Face configuration; build the model and a batch.

    Args:
        location: "model.py", "model.py:name", "hf:config.json", or "model.onnx".
        seed: given to `torch.manual_seed` before the file runs and before the model is built.
        meta: build the model from shapes alone: no tensor has numbers.
        blank: leave the parameters without numbers and make all else: weights come later.
        cache: rows of keys and values that are kept: the model is then one of single positions.

    Raises:
        InputError: the file cannot be used; names its line, and the candidates for the model.
        CaptureError: `cache`, and the model has no form of one position.
    """
    if cache:
        return _cached(load_model_file(location, seed=seed, meta=meta, blank=blank), cache, meta)
    if is_hf(location):
        return _of_hf(str(location), seed, meta, blank)
    if is_onnx(location):
        return _of_onnx(str(location), seed, blank)
    path, name = split_location(location)
    with users_folder(path.parent):
        with unmade() if blank else contextlib.nullcontext():
            module = _run(path, seed)
        name = name or _only_model(module, path)
        with _building(meta, blank):
            model = _build(module, path, name, seed)
        batch = _example(module, path, seed)
    _reserve(model, meta, blank)
    return ModelFile(
        path,
        name,
        model,
        batch,
        **cast("Mapping[str, Any]", training_of(module, path, model)),
        leaves=_leaves(module, path),
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


def training_of(defined: object, path: Path, model: nn.Module) -> dict[str, object]:
    """Return how a model is trained, by the names of `ModelFile`.

    Args:
        defined: what has these names: a module, or anything else with attributes.
        path: what to call it in errors.
        model: which is trained.

    Raises:
        InputError: one of them is not what it must be.
    """
    module = cast("ModuleType", defined)
    return {
        **_functions(module, path),
        "clip_norm": _clip_norm(module, path),
        "grad_scaler": _grad_scaler(module, path, model),
        "autocast": _autocast(module, path),
        "drop_last": _drop_last(module, path),
        "batch_dims": _batch_dims(module, path),
        "pad": _pad(module, path),
    }


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
            "an ONNX file holds its weights itself", at=at.path.name, help="leave --weights out"
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
    """Let tensors without numbers be CPU tensors: then the trace is that of the whole model."""
    if (meta or blank) and not reserve(model) and blank:
        raise InputError(
            "this system grants no memory addresses without memory behind them",
            notes=("vm.overcommit_memory is 2, or the address space is limited",),
            help="raise `ulimit -v`, or leave --weights out and use `bigbrain-fx load` afterwards",
        )


class _DataFolders(importlib.abc.MetaPathFinder):
    """Keep Python from taking a folder of data beside the model file for a package.

    torch looks for modules that it can do without (triton, z3, optree), and any folder is a
    package to Python, though it has no Python in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        """Raise for a folder without Python that is no package elsewhere either; else, pass."""
        there = self.folder / name
        if path is not None or not there.is_dir() or any(map(_is_python, there.rglob("*"))):
            return
        found = PathFinder.find_spec(name)
        if found is None or found.origin is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _is_python(file: Path) -> bool:
    return file.suffix in (".py", ".pyc", ".so")


@contextlib.contextmanager
def users_folder(folder: Path) -> Iterator[None]:
    """Put the user's folder on sys.path, as `python model.py` would."""
    entry = str(folder)
    if not any(isinstance(f, _DataFolders) and f.folder == folder for f in sys.meta_path):
        sys.meta_path.insert(0, _DataFolders(folder))
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


def _run(path: Path, seed: int) -> ModuleType:
    """Run the file as a module named like it, so that a bundle can import it by the same name."""
    name = path.stem
    loaded = sys.modules.get(name)
    ours = getattr(loaded, "__bigbrain_fx__", False)
    if name in sys.stdlib_module_names or (loaded is not None and not ours):
        name = f"{name}_model"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__bigbrain_fx__"] = True
    sys.modules[name] = module
    torch.manual_seed(seed)
    try:
        with _errors_of(path, f"{path.name} cannot be run"):
            spec.loader.exec_module(module)
    except InputError:
        sys.modules.pop(name, None)
        raise
    return module


@contextlib.contextmanager
def _errors_of(path: Path, what: str) -> Iterator[None]:
    """Turn whatever the user's code raises into an InputError that names the line."""
    try:
        yield
    except InputError:
        raise
    except SyntaxError as error:
        at = f"{Path(error.filename or path).name}:{error.lineno}"
        raise InputError(
            f"{what}: syntax error: {error.msg}", at=at, help="mend that line"
        ) from error
    except SystemExit as error:
        raise InputError(
            f"{what}: it called sys.exit({error.code!r})",
            at=_line(error, path),
            help='put the part that runs the program under `if __name__ == "__main__":`',
        ) from error
    except ImportError as error:
        raise InputError(
            f"{what}: {error}", at=_line(error, path), help=_import_help(error, path)
        ) from error
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"{what}: {type(error).__name__}: {text}",
            at=_line(error, path),
            help=f"make `python {path.name}` build the model first",
        ) from error


def _import_help(error: ImportError, path: Path) -> str:
    if "relative import" not in str(error):
        return "install the module into this Python, or put it beside the model file"
    return (
        f"a model file is run as `python {path.name}` would run it: write `from name import ...` "
        f"for a module beside it, or move it out of its package and import that by its name"
    )


def _line(error: BaseException, path: Path) -> str:
    return where(error, path.parent) or where(error) or path.name


def _candidates(module: ModuleType) -> list[str]:
    """List what could be the model: module classes and instances that the file itself defines."""
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
            at=path.name,
            help="add: def model() -> nn.Module: return MyModel()",
        )
    raise InputError(
        f"{path.name} defines no `model`, and {len(names)} modules could be meant",
        at=path.name,
        notes=("candidates: " + ", ".join(f"{path.name}:{name}" for name in names),),
        help=f"say which: {path.name}:{names[-1]}, or add: def model() -> nn.Module",
    )


def _build(module: ModuleType, path: Path, name: str, seed: int) -> nn.Module:
    if not hasattr(module, name):
        names = ", ".join(f"{path.name}:{entry}" for entry in _candidates(module)) or "none"
        raise InputError(
            f"{path.name} defines no `{name}`",
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
    with _errors_of(path, f"{name}() failed"):
        built = value()
    if not isinstance(built, nn.Module):
        raise _no_module(path, name, built, module)
    return built


def _no_module(path: Path, name: str, found: object, module: ModuleType) -> InputError:
    names = ", ".join(f"{path.name}:{entry}" for entry in _candidates(module)) or "none"
    return InputError(
        f"`{name}` must be or return a torch.nn.Module, found {type(found).__name__}",
        at=_definition(getattr(module, name), path),
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
            at=_definition(value, path),
            help=f"add: def model() -> nn.Module: return {name}(...)",
        )


def _definition(value: object, path: Path) -> str:
    try:
        return f"{path.name}:{inspect.getsourcelines(cast('type', value))[1]}"
    except (OSError, TypeError):
        return path.name


def _example(module: ModuleType, path: Path, seed: int) -> object:
    value = getattr(module, "example_batch", None)
    if value is None:
        raise InputError(
            f"{path.name} must define `example_batch`",
            at=path.name,
            help="add: def example_batch(): return one mini-batch as a dict or tuple of tensors",
        )
    if callable(value):
        torch.manual_seed(seed)
        with _errors_of(path, "example_batch() failed"):
            value = value()
    if not isinstance(value, Mapping | tuple | list | Tensor):
        raise InputError(
            f"example_batch() must return a dict or a tuple, found {type(value).__name__}",
            at=_definition(getattr(module, "example_batch"), path),  # noqa: B009  # a module's attribute
            help='return {"x": ..., "y": ...} or (x, y)',
        )
    return value


MADE = (
    "each device makes its own, of its own parameters: define optimizer(named_params), or give the "
    "class with its options, functools.partial(torch.optim.AdamW, lr=1e-3)"
)


def _functions(module: ModuleType, path: Path) -> dict[str, object]:
    """Collect the optional functions of the contract."""
    found: dict[str, object] = {}
    for name in ("loss", "batches", "optimizer", "lr_scale", "scheduler"):
        value = getattr(module, name, None)
        if value is not None and not callable(value):
            raise InputError(
                f"`{name}` must be a function, found {type(value).__name__}",
                at=path.name,
                help=MADE if name == "optimizer" else f"define it: def {name}(...)",
            )
        found[name] = value
    if found["batches"] is not None:
        _require_seeded(found["batches"], path)
    if found["lr_scale"] is not None and found["scheduler"] is not None:
        raise InputError(
            "the file has both `lr_scale` and `scheduler`, and each sets the learning rates",
            at=_definition(found["scheduler"], path),
            help="leave one out; torch.optim.lr_scheduler.LambdaLR(optimizer, lr_scale) is a "
            "scheduler that does what lr_scale does",
        )
    return found


def _require_seeded(batches: object, path: Path) -> None:
    """Refuse a `batches` that cannot be called with a seed, before a run does so.

    Raises:
        InputError: it cannot.
    """
    try:
        inspect.signature(batches).bind(0)  # type: ignore[arg-type]  # it is callable
    except ValueError:
        return  # of C: a run will see
    except TypeError as error:
        raise InputError(
            f"`batches` is called as batches(seed), and takes other arguments: {error}",
            at=_definition(batches, path),
            help="define it: def batches(seed): ..., and draw what is random by the seed, which "
            "a run that is started with --seed chooses",
        ) from error


def _clip_norm(module: ModuleType, path: Path) -> float | None:
    value = getattr(module, "clip_norm", None)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise InputError(
            f"`clip_norm` must be a number above 0, found {value!r}",
            at=path.name,
            help="clip_norm = 1.0",
        )
    return float(value)


_SCALING: dict[str, tuple[float, Callable[[float], bool]]] = {
    "init_scale": (65536.0, lambda v: 2.0**-16 <= v <= 2.0**100),  # see runtime/loss_scale.py
    "growth_factor": (2.0, lambda v: 1 < v <= 2.0**100),
    "backoff_factor": (0.5, lambda v: 0 < v < 1),
    "growth_interval": (2000, lambda v: 1 <= v < 2**31 and v == int(v)),
}
_SCALER_HELP = "grad_scaler = True, or arguments of torch.amp.GradScaler: {'init_scale': 1024.0}"


def _grad_scaler(module: ModuleType, path: Path, model: nn.Module) -> dict[str, int | float] | None:
    """Return the arguments of a dynamic loss scale."""
    value = getattr(module, "grad_scaler", None)
    if value is None or value is False:
        return None
    given = {} if value is True else value
    if not isinstance(given, Mapping):
        raise InputError(
            f"`grad_scaler` must be True or a dict, found {type(value).__name__}",
            at=path.name,
            help=_SCALER_HELP,
        )
    for name, number in given.items():
        if name not in _SCALING or not _is_number(number) or not _SCALING[name][1](number):
            raise InputError(
                f"`grad_scaler` has {name!r}: {number!r}", at=path.name, help=_SCALER_HELP
            )
    halves = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype == torch.half]
    if halves:
        raise InputError(
            f"`grad_scaler` with trained parameters in float16 ({halves[0]}): their gradients "
            "cannot be unscaled, as torch.amp.GradScaler says, too",
            at=path.name,
            help='keep the weights in float32 and compute in float16: autocast = "float16"',
        )
    found = {name: given.get(name, default) for name, (default, _) in _SCALING.items()}
    return {**found, "growth_interval": int(found["growth_interval"])}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _autocast(module: ModuleType, path: Path) -> str | None:
    value = getattr(module, "autocast", None)
    if value is None:
        return None
    if value not in _DTYPES:
        raise InputError(
            f"`autocast` must be one of {', '.join(_DTYPES)}, found {value!r}",
            at=path.name,
            help='autocast = "bfloat16"',
        )
    return str(value)


def _drop_last(module: ModuleType, path: Path) -> bool | None:
    value = getattr(module, "drop_last", None)
    if value is None or isinstance(value, bool):
        return value
    raise InputError(
        f"`drop_last` must be True or False, found {value!r}",
        at=path.name,
        help="drop_last = True: a smaller last batch is left out; False: its rows weigh the same",
    )


def _batch_dims(module: ModuleType, path: Path) -> Mapping[str | int, int | None]:
    value = getattr(module, "batch_dims", {})
    fits = isinstance(value, Mapping) and all(
        isinstance(name, str | int) and (dim is None or (type(dim) is int and dim >= 0))
        for name, dim in value.items()
    )
    if not fits:
        raise InputError(
            f"`batch_dims` must be a dict from entries of the batch to dimensions, found {value!r}",
            at=path.name,
            help='batch_dims = {"x": 1, "mask": None}: x has its rows in dimension 1, every '
            "micro-batch gets the whole mask; entries of a tuple go by number",
        )
    return dict(value)


def _pad(module: ModuleType, path: Path) -> Mapping[str | int, int | float]:
    value = getattr(module, "pad", {})
    fits = isinstance(value, Mapping) and all(
        isinstance(name, str | int) and isinstance(fill, int | float)
        for name, fill in value.items()
    )
    if not fits:
        raise InputError(
            f"`pad` must be a dict from entries of the batch to numbers, found {value!r}",
            at=path.name,
            help='pad = {"tokens": 0, "labels": -100}: what a shorter one is filled up with, to '
            "the example's shape",
        )
    return dict(value)


def _leaves(module: ModuleType, path: Path) -> tuple[str, ...]:
    value = getattr(module, "leaves", ())
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise InputError(
            f"`leaves` must be a list of module paths or class names, found {value!r}",
            at=path.name,
            help='leaves = ["blocks.0.experts", "Router"]',
        )
    return tuple(value)
