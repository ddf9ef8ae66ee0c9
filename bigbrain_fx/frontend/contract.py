"""Training options of a model file: its optional names, each checked before it is used.

The module runs none of the user's functions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.translation.batch_dims import RAGGED
from bigbrain_fx.frontend.users_code import definition
from bigbrain_fx.runtime import marking

if TYPE_CHECKING:
    from bigbrain_fx.frontend.tracing.optimizers.as_data import GroupedOptimizer

Mark: TypeAlias = bool | int | float | str | None
_MARKS = (bool, int, float, str, type(None))
_DTYPES = ("bfloat16", "float16")
_MADE = (
    "each device makes its own, of its own parameters: define optimizer(named_params), or give the "
    "class with its options, functools.partial(torch.optim.AdamW, lr=1e-3)"
)
_SCHEDULER = (
    "each device makes its own, for its optimizer: define scheduler(optimizer), or give the class "
    "with its options, functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100)"
)
_HELP = {"optimizer": _MADE, "scheduler": _SCHEDULER}


def training_of(defined: object, path: Path, model: nn.Module) -> dict[str, object]:
    """Return how a model is trained, by the names of `ModelFile`.

    Args:
        defined: object with these names: a module, or anything else with attributes.
        path: name of `defined` in errors.
        model: the trained one.

    Raises:
        InputError: one of the names has a value of a wrong kind.
    """
    module = cast("ModuleType", defined)
    functions, marks = functions_of(module, path), marks_of(model)
    make = cast("Callable[..., torch.optim.Optimizer] | None", functions["optimizer"])
    if isinstance(make, torch.optim.Optimizer):
        functions["optimizer"] = _made_before(make, module, path, model)
    elif make is not None and marks:  # trials make it of parameters of their own
        functions["optimizer"] = marking(marks, make)
    return {
        **functions,
        "clip_norm": _clip_norm(module, path),
        "grad_scaler": _grad_scaler(module, path, model),
        "autocast": _autocast(module, path),
        "drop_last": _drop_last(module, path),
        "batch_dims": _batch_dims(module, path),
        "pad": _pad(module, path),
        "lengths": _lengths(module, path),
    }


def _made_before(
    made: torch.optim.Optimizer, module: ModuleType, path: Path, model: nn.Module
) -> GroupedOptimizer:
    """Return a function that rebuilds an existing optimizer."""
    from bigbrain_fx.frontend.tracing.optimizers.as_data import as_data

    _require_own(made, model, path)
    functions = [getattr(module, name, None) for name in ("scheduler", "lr_scale")]
    said = any(functions) or getattr(module, "sends_rates", False)
    if not said and any("initial_lr" in group for group in made.param_groups):
        raise InputError(
            "`optimizer` has a scheduler, and there is no `scheduler` that a device would step",
            code="BX2033b",
            at=path.name,
            help=_SCHEDULER,
        )
    has_state = said and not any(functions)  # a session sends it with the weights
    found = as_data(made, dict(model.named_parameters()), vars(module), has_state=has_state)
    if found is None:
        raise InputError(
            f"`optimizer` is a {type(made).__name__} that cannot be made again for each device",
            code="BX2033a",
            at=path.name,
            notes=(
                "it has made a step, or parameters that are not this model's, or more in it than "
                "its class, its groups and numbers",
            ),
            help=_MADE,
        )
    return found


def _require_own(made: torch.optim.Optimizer, model: nn.Module, path: Path) -> None:
    """Refuse an optimizer of the model and of something else: of its criterion, say."""
    own = {id(parameter) for parameter in model.parameters()}
    stepped = [p for group in getattr(made, "param_groups", ()) for p in group["params"]]
    strange = [str(tuple(p.shape)) for p in stepped if id(p) not in own]
    if 0 < len(strange) < len(stepped):
        raise InputError(
            f"`optimizer` steps a parameter that the model does not have, of shape {strange[0]}",
            code="BX2033c",
            at=path.name,
            help="make the module that has it (a criterion, say) a part of the model: "
            "model.criterion = criterion below the optimizer. The loss reads it as before",
        )


def marks_of(model: nn.Module) -> dict[str, dict[str, Mark]]:
    """Return the user's own attributes of trained parameters, by name: `_no_weight_decay`, say."""
    found = {
        name: {key: value for key, value in vars(p).items() if type(value) in _MARKS}
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    return {name: own for name, own in found.items() if own}


def functions_of(module: ModuleType, path: Path) -> dict[str, object]:
    """Collect the optional functions of the contract.

    Raises:
        InputError: one is no function, or takes other arguments.
    """
    found: dict[str, object] = {}
    for name in ("loss", "batches", "optimizer", "lr_scale", "scheduler", "loss_weight", "micro"):
        value = getattr(module, name, None)
        is_made = name == "optimizer" and isinstance(value, torch.optim.Optimizer)
        if value is not None and not callable(value) and not is_made:
            raise InputError(
                f"`{name}` must be a function, found {type(value).__name__}",
                code="BX2033",
                at=path.name,
                help=_HELP.get(name, f"define it: def {name}(...)"),
            )
        found[name] = value
    if found["batches"] is not None:
        found["batches"] = seeded(cast("Callable[..., object]", found["batches"]))
        _require_seeded(found["batches"], path)
    if found["lr_scale"] is not None and found["scheduler"] is not None:
        raise InputError(
            "the file has both `lr_scale` and `scheduler`, and each sets the learning rates",
            code="BX2034",
            at=definition(found["scheduler"], path),
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
            code="BX2035",
            at=definition(batches, path),
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
            code="BX2036",
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
            code="BX2037",
            at=path.name,
            help=_SCALER_HELP,
        )
    for name, number in given.items():
        if name not in _SCALING or not _is_number(number) or not _SCALING[name][1](number):
            raise InputError(
                f"`grad_scaler` has {name!r}: {number!r}",
                code="BX2038",
                at=path.name,
                help=_SCALER_HELP,
            )
    halves = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype == torch.half]
    if halves:
        raise InputError(
            f"`grad_scaler` with trained parameters in float16 ({halves[0]}): their gradients "
            "cannot be unscaled, as torch.amp.GradScaler says, too",
            code="BX2039",
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
            code="BX2040",
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
        code="BX2041",
        at=path.name,
        help="drop_last = True: a smaller last batch is left out; False: its rows weigh the same",
    )


def _batch_dims(module: ModuleType, path: Path) -> Mapping[str | int, int | str | None]:
    value = getattr(module, "batch_dims", {})
    fits = isinstance(value, Mapping) and all(
        isinstance(name, str | int) and _is_batch_dim(dim) for name, dim in value.items()
    )
    if not fits:
        raise InputError(
            f"`batch_dims` must be a dict from entries of the batch to dimensions, found {value!r}",
            code="BX2042",
            at=path.name,
            help='batch_dims = {"x": 1, "mask": None, "cu_seqlens": "ragged:x"}: x has its rows in '
            "dimension 1, every micro-batch gets the whole mask, and offsets into its own rows; "
            "entries of a tuple go by number",
        )
    return dict(value)


def _is_batch_dim(dim: object) -> bool:
    if isinstance(dim, str):
        return dim.startswith(RAGGED) and len(dim) > len(RAGGED)
    return dim is None or (type(dim) is int and dim >= 0)


def _pad(module: ModuleType, path: Path) -> Mapping[str | int, int | float]:
    value = getattr(module, "pad", {})
    fits = isinstance(value, Mapping) and all(
        isinstance(name, str | int) and isinstance(fill, int | float)
        for name, fill in value.items()
    )
    if not fits:
        raise InputError(
            f"`pad` must be a dict from entries of the batch to numbers, found {value!r}",
            code="BX2043",
            at=path.name,
            help='pad = {"tokens": 0, "labels": -100}: what a shorter one is filled up with, to '
            "the example's shape",
        )
    return dict(value)


def _lengths(module: ModuleType, path: Path) -> tuple[int, ...] | None:
    """Return the lengths of batches, the shortest first; empty where all are the example's."""
    value = getattr(module, "lengths", None)
    if value is None:
        return None
    if not isinstance(value, tuple | list) or not all(type(n) is int and n > 1 for n in value):
        raise InputError(
            f"`lengths` must be a tuple of whole numbers above 1, found {value!r}",
            code="BX2205",
            at=path.name,
            help="lengths = (64, 128, 256): the lengths of batches, to which `pad` fills them up",
        )
    if value and getattr(module, "batches", None) is None and path.suffix == ".py":
        raise InputError(
            "the file has `lengths` and no `batches`, so that every batch is the example",
            code="BX2206",
            at=path.name,
            help="define batches(seed), or leave lengths out",
        )
    return tuple(sorted({*value}))


def kept_whole(module: ModuleType, path: Path) -> tuple[str, ...]:
    """Return the opaque modules that the file names, by path or class."""
    value = getattr(module, "leaves", ())
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise InputError(
            f"`leaves` must be a list of module paths or class names, found {value!r}",
            code="BX2044",
            at=path.name,
            help='leaves = ["blocks.0.experts", "Router"]',
        )
    return tuple(value)


def seeded(batches: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a seed that gives batches, where the user's takes none."""
    try:
        takes = inspect.signature(batches).parameters
    except ValueError:  # of C
        return batches
    if takes:
        return batches

    @functools.wraps(batches)
    def called(_seed: int) -> Any:  # noqa: ANN401  # as the user's
        return batches()

    seed = inspect.Parameter("seed", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    called.__signature__ = inspect.Signature([seed])  # type: ignore[attr-defined]
    return called
