"""Models without numbers: tensors of shapes and addresses, filled later from a checkpoint.

`unmade()` builds a model with its parameters on the meta device and all else as usual. `reserve`
then gives every meta tensor an untouched address range, of which the system backs no page. To torch
it is a plain CPU tensor, so the trace is that of the model with its weights. Tables that the model
computes (rotary frequencies) are real. This file knows modules and memory; it knows no traces.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from bigbrain_fx.frontend.hf.weights import converted
from bigbrain_fx.frontend.translation.params import store
from bigbrain_fx.weights import Checkpoint, Scratch, match, read_checkpoint

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # the number on Linux; named in Python 3.13
_ON_META = torch.device("meta")


@contextlib.contextmanager
def unmade() -> Iterator[None]:
    """Move each parameter to the meta device as soon as a module registers it.

    The parameter stays the same object, so ties stay; initialising it costs nothing. Buffers are
    left alone. The idea is accelerate's `init_empty_weights(include_buffers=False)`.
    """
    register = nn.Module.register_parameter

    def register_unmade(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        held = self._parameters.get(name)
        if held is not None and held.device != _ON_META:
            _become(held, held.detach().to(_ON_META))

    nn.Module.register_parameter = register_unmade  # type: ignore[method-assign]  # put back
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def reserve(model: nn.Module) -> bool:
    """Give every meta tensor of a model an untouched range of addresses.

    Returns:
        Whether it could be done; where the system grants no such ranges all stays as it was.
    """
    found = {id(t): t for t in (*model.parameters(), *model.buffers()) if t.device == _ON_META}
    try:
        places = {key: _range(tensor) for key, tensor in found.items()}
    except OSError:
        return False
    for key, tensor in found.items():
        _become(tensor, places[key])
        setattr(tensor, _MARK, True)
    return True


def supply(tensor: Tensor, numbers: Tensor) -> None:
    """Give a blank tensor its numbers."""
    _become(tensor, numbers)
    unmark(tensor)


@contextlib.contextmanager
def lent(model: nn.Module) -> Iterator[None]:
    """Give blank tensors of a model some numbers for a while, so that it can be run."""
    found = {id(t): t for t in (*model.parameters(), *model.buffers()) if is_blank(t)}
    before = {key: tensor.data for key, tensor in found.items()}
    dice = torch.Generator().manual_seed(0)
    try:
        for tensor in found.values():
            if tensor.is_floating_point():
                numbers = torch.empty(tensor.shape).normal_(0.0, 0.1, generator=dice)
                tensor.data = (numbers if tensor.dim() > 1 else 1 + numbers).to(tensor.dtype)
        yield
    finally:
        for key, tensor in found.items():
            tensor.data = before[key]


def unmark(tensor: Tensor) -> None:
    """Take note that a tensor has its numbers."""
    tensor.__dict__.pop(_MARK, None)


def is_blank(tensor: Tensor) -> bool:
    """Whether a tensor has no numbers: it is on meta, or `reserve` made it."""
    return tensor.device == _ON_META or getattr(tensor, _MARK, False)


_MARK = "_bigbrain_fx_blank"


def _become(tensor: Tensor, new: Tensor) -> None:
    """Put another tensor's data into a tensor or parameter; it stays the same Python object."""
    wants = tensor.requires_grad
    if isinstance(tensor, nn.Parameter):
        twin: Tensor = nn.Parameter(new, requires_grad=wants)
    else:
        twin = new.requires_grad_(wants)
    attributes = dict(tensor.__dict__)
    torch.utils.swap_tensors(tensor, twin)
    tensor.__dict__.update(attributes)


def _range(tensor: Tensor) -> Tensor:
    """Return a CPU tensor like this meta tensor, with reserved memory that no page backs."""
    count = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if not math.prod(tensor.shape):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, count * tensor.element_size(), flags=flags)
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=count)
    return flat.as_strided(tensor.shape, tensor.stride())


def fill(model: nn.Module, path: Path) -> None:
    """Read a checkpoint into a model, as `split --weights` does into a bundle.

    Raises:
        InputError: the checkpoint does not fit the model, or is gone.
    """
    checkpoint = read_checkpoint(path)
    kept = store(model, {})
    with Scratch("weights") as scratch:
        named = Checkpoint(checkpoint.path, converted(model, checkpoint, Path(scratch)))
        for name, stored in match(kept.params, named).sources.items():
            tensor = kept.tensors[name]
            with safe_open(stored.file, framework="pt") as file:
                found = file.get_tensor(stored.key).to(tensor.dtype)
            if tensor.device.type == "meta":
                supply(tensor, found)
                continue
            with torch.no_grad():
                tensor.copy_(found)  # its reserved memory becomes real
            unmark(tensor)
