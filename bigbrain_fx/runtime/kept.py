"""The user's own Python in stages: assumptions that are checked, opaque modules.

This file knows tensors; it knows nothing of devices, messages or schedules.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from .modules import Region, active, default_types
from .stream import BatchError

_ANSWERED = (
    "{place}: this was {answer} for the example batch, and is {other} for these data, for which "
    "the model goes another way than the bundle: compute without the question (torch.where, or a "
    "factor that is 0), or put the lines that ask into a module of their own, which "
    "`split --opaque CLASS` keeps whole; split again"
)


class AssumptionError(BatchError):
    """Report data for which the model would have taken another path than the one written here."""


def assume(condition: Tensor, place: str) -> None:
    """Require a tensor to be true, as it was when the model was split.

    On the CPU the error comes at once. On a GPU the check is queued like any kernel, so nothing
    waits for it: the error, with the place, comes with a later call.

    Args:
        condition: one number, as in `if condition:`.
        place: of the model's branch, "model.py:31".

    Raises:
        AssumptionError: it is false; the model itself would take another branch.
    """
    _require(condition, True, place)


def assume_not(condition: Tensor, place: str) -> None:
    """Require a tensor to be false; arguments and errors as in `assume`."""
    _require(condition, False, place)


def _require(condition: Tensor, answer: bool, place: str) -> None:
    value = condition.detach()
    text = _ANSWERED.format(place=place, answer=answer, other=not answer)
    if value.device.type == "cpu":
        if bool(value) is not answer:
            raise AssumptionError(text, code="BX5051")
        return
    torch._assert_async((value != 0) if answer else (value == 0), text)


# --------------------------------------------------------------------------- random numbers


def all_seeded(
    region: Region, name: str = "", index: int = 0, of: int = 1
) -> contextlib.AbstractContextManager[None]:
    """Seed all generators of opaque code in a block: torch's, Python's and NumPy's.

    Args:
        region: that calls the code.
        name: as of its `seeded`.
        index: likewise.
        of: likewise.
    """
    found = region.seeded(name, index, of)
    if active.key is not None:
        device = active.device
        of_card = device.type == "cuda" and torch.cuda.default_generators[device.index or 0]
        seed_python((of_card or torch.default_generator).initial_seed())
    return found


def seed_python(number: int) -> None:
    """Seed the generators that all of Python and of NumPy share."""
    random.seed(number)
    numpy_random = sys.modules.get("numpy.random")  # nothing here needs it: a user may
    if numpy_random is not None:
        numpy_random.seed(number % 2**32)


# --------------------------------------------------------------------------- opaque modules

_built: dict[object, nn.Module] = {}


def part_of(model: Callable[[], nn.Module] | nn.Module, path: str) -> nn.Module:
    """Return one module of the user's model, its numbers still to be loaded.

    The model is built without numbers (on the meta device), once in a process; where that fails it
    is built with them.

    Args:
        model: the user's `model()`, or the module itself.
        path: of the part, "blocks.0.experts".
    """
    part = copy.deepcopy(built(model).get_submodule(path)).to_empty(device="cpu")
    for module in part.modules():
        module._non_persistent_buffers_set.clear()  # a bundle stores them, too
    return part


def built(model: Callable[[], nn.Module] | nn.Module) -> nn.Module:
    """Return the user's model, its numbers still to be loaded; made once in a process."""
    if model not in _built:
        _built[model] = model if isinstance(model, nn.Module) else _without_numbers(model)
    return _built[model]


def _without_numbers(model: Callable[[], nn.Module]) -> nn.Module:
    try:
        with torch.device("meta"), as_in_file():
            return model()
    except (RuntimeError, NotImplementedError):  # reads a value as it builds, or has no meta kernel
        with torch.device("cpu"), as_in_file():  # stages are made on the meta device, too
            return model()


def flat(value: object) -> tuple[Tensor, ...]:
    """Return the tensors of a module's result, in order: of tuples, lists, dicts, dataclasses."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, Mapping):
        return tuple(tensor for item in value.values() for tensor in flat(item))
    if isinstance(value, tuple | list):
        return tuple(tensor for item in value for tensor in flat(item))
    fields = getattr(value, "__dataclass_fields__", ())
    return tuple(tensor for name in fields for tensor in flat(getattr(value, name)))


@contextlib.contextmanager
def as_in_file() -> Iterator[None]:
    """Let the user's code, called as a stage is built, have the default type of the model file."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default_types[-1] if default_types else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
