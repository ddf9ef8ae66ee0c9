"""The training loop that any user would write, in plain PyTorch; it imports nothing of ours.

    python -m tools.conformance forms.loop model.py FOLDER

What it leaves there is the measure of a bundle: losses, and tensors by name after the last step.

A bundle that runs the user's own step is measured by the same loop with its random numbers: the
generators of torch, Python and NumPy are seeded by step and micro-batch, data draw with states of
their own, and a batch that is not cut is the batch itself.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import inspect
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 4


def train(
    path: Path, micro_batches: int, *, keyed: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """Train a model file's model; return the loss of each step, and all tensors at the end."""
    code = _run(path)
    torch.manual_seed(0)
    model = code.model if isinstance(code.model, torch.nn.Module) else code.model()
    drawn = _drawn(code, keyed)  # a loop has no example: it may draw from the data's own generator
    torch.manual_seed(0)
    example = None if keyed and hasattr(code, "batches") else code.example_batch()
    model.train()
    roll = _roll if keyed else _roll_on
    roll(0, 0, "optimizer")
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    made = code.optimizer(named) if callable(code.optimizer) else code.optimizer
    base = [group.get("lr") for group in made.param_groups]
    scheduler = code.scheduler(made) if hasattr(code, "scheduler") else None
    scaling = getattr(code, "grad_scaler", None) or {"enabled": False}
    scaler = torch.amp.GradScaler("cpu", **scaling)
    losses = []
    for step, batch in enumerate(itertools.islice(_kept(code, example, drawn), STEPS)):
        parts = [batch] if keyed and micro_batches == 1 else _parts(code, batch, micro_batches)
        losses.append(_step(code, model, parts, scaler, made, base, step, roll))
        if scheduler is not None:
            asks = "metrics" in inspect.signature(scheduler.step).parameters
            scheduler.step(*[losses[-1]] * asks)
    state = model.state_dict().items()
    return losses, {n: t.detach() for n, t in state if isinstance(t, Tensor)}


def _roll(step: int, micro: int, place: str) -> None:
    """Seed what draws at a place of a micro-batch."""
    text = f"0/{step}/{micro}/{place}"
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(number % 2**32)


def _roll_on(step: int, micro: int, place: str) -> None:
    """Let generators go on."""


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = code
    sys.path.insert(0, str(path.parent))
    torch.manual_seed(0)
    spec.loader.exec_module(code)
    return code


def _kept(code: ModuleType, example: object, drawn: Iterator[object]) -> Iterator[object]:
    """Leave out a smaller last batch where the file says so; without data, repeat the example."""
    if not hasattr(code, "batches"):
        return itertools.repeat(example)
    if not getattr(code, "drop_last", None):
        return drawn
    rows = _rows(code, code.example_batch() if example is None else example)
    return (batch for batch in drawn if _rows(code, batch) >= rows)


def _drawn(code: ModuleType, keyed: bool) -> Iterator[object]:
    """Draw the data with dice of their own, as a loader's worker does."""
    if not hasattr(code, "batches"):
        return iter(())
    if keyed:
        return _one_by_one(code)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = itertools.islice(_begun(code), 2 * STEPS)
        return iter([copy.deepcopy(batch) for batch in drawn])  # it may write the next one there


def _begun(code: ModuleType) -> Iterable[object]:
    """Call the file's `batches`, which may take no seed."""
    found: Iterable[object] = code.batches(*[0] * bool(inspect.signature(code.batches).parameters))
    return found


def _one_by_one(code: ModuleType) -> Iterator[object]:
    """Draw each batch when its step begins."""
    own: tuple[Any, ...] = torch.Generator().manual_seed(0).get_state(), random.Random(0).getstate()
    numpy_random = sys.modules.get("numpy.random")
    own += (numpy_random.RandomState(0).get_state() if numpy_random else None,)
    source: Iterator[object] | None = None
    while True:
        outer = _states()
        _set_states(own)
        try:
            source = iter(_begun(code)) if source is None else source
            batch = next(source)
        except StopIteration:
            return
        finally:
            own = _states()
            _set_states(outer)
        yield batch


def _states() -> tuple[Any, ...]:
    numpy_random = sys.modules.get("numpy.random")
    own = numpy_random.get_state() if numpy_random else None
    return torch.default_generator.get_state(), random.getstate(), own


def _set_states(states: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    with contextlib.suppress(KeyError):
        sys.modules["numpy.random"].set_state(states[2])


def _step(
    code: ModuleType,
    model: nn.Module,
    parts: list[Any],
    scaler: torch.amp.GradScaler,
    made: torch.optim.Optimizer,
    base: list[float],
    step: int,
    roll: Callable[[int, int, str], None],
) -> float:
    """Train one step; an optimizer that asks for it computes the loss by a closure."""
    losses: list[float] = []

    def compute() -> float:
        model.zero_grad(set_to_none=True)
        made.zero_grad()
        losses.append(_backward(code, model, parts, scaler, lambda m: roll(step, m, "")))
        if scaler.is_enabled():
            scaler.unscale_(made)
        if hasattr(code, "clip_norm"):
            nn.utils.clip_grad_norm_(model.parameters(), code.clip_norm)
        return losses[-1]

    closure = inspect.signature(made.step).parameters.get("closure")
    asks = closure is not None and closure.default is inspect.Parameter.empty
    if not asks:
        compute()
    roll(step, 0, "update")
    if hasattr(code, "lr_scale"):
        for group, lr in zip(made.param_groups, base, strict=True):
            group["lr"] = lr * code.lr_scale(step)
    scaler.step(made, *[compute] * asks)
    scaler.update()
    model.zero_grad(set_to_none=True)
    return losses[0]


def _backward(
    code: ModuleType,
    model: nn.Module,
    parts: list[Any],
    scaler: torch.amp.GradScaler,
    roll: Callable[[int], None],
) -> float:
    total, rows = 0.0, sum(_rows(code, part) for part in parts) if len(parts) > 1 else 1
    for micro, part in enumerate(parts):
        roll(micro)
        with _autocast(code):
            output = _call(code, model, part)
            own = _loss(code)
            loss = _own(own(output, part) if own else output)
        share = _rows(code, part) / rows if len(parts) > 1 else 1.0
        scaler.scale(loss * share).backward()
        total += float(loss.detach().double()) * share
    return total


def _autocast(code: ModuleType) -> torch.autocast:
    kind = getattr(code, "autocast", None)
    dtype = getattr(torch, kind) if kind else torch.bfloat16
    return torch.autocast("cpu", dtype=dtype, enabled=kind is not None)


def _loss(code: ModuleType) -> Callable[[object, object], Any] | None:
    """Return the file's loss; None where forward returns it."""
    found: Callable[[object, object], Any] | None = getattr(code, "loss", None)
    return found


def _own(output: Any) -> Tensor:  # noqa: ANN401  # of any model or loss
    if isinstance(output, tuple):
        numbers = [t for t in output if isinstance(t, Tensor) and not t.dim()]
        output = next(t for t in numbers if t.requires_grad)
    found = output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)
    assert isinstance(found, Tensor)
    return found


def _call(code: ModuleType, model: nn.Module, batch: Any) -> object:  # noqa: ANN401  # of any form
    """Give forward what it takes of a batch; a form that says how itself defines `_call`."""
    if hasattr(code, "_call"):
        return code._call(model, batch)
    parameters = inspect.signature(model.forward).parameters
    if isinstance(batch, Mapping):
        wild = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return model(**{k: v for k, v in batch.items() if wild or k in parameters})
    count = min(len(parameters), len(batch) - bool(_loss(code)))
    return model(*batch[:count])


def _parts(code: ModuleType, batch: Any, count: int) -> list[Any]:  # noqa: ANN401
    """Cut every tensor that has the batch's rows into parts, equal as far as they go."""
    rows, dims = _rows(code, batch), _dims(code)

    def part(tensor: Tensor, key: object, number: int) -> Tensor:
        dim = dims.get(key, 0)
        if dim is None or not tensor.dim() or tensor.shape[dim] != rows:
            return tensor.clone()
        return tensor.tensor_split(count, dim)[number].clone()

    return [_mapped(batch, partial(part, number=m)) for m in range(min(count, rows))]


def _dims(code: ModuleType) -> Mapping[object, int | None]:
    """Return the dimension that is the batch, by entry, where the file says it."""
    found: Mapping[object, int | None] = getattr(code, "batch_dims", {})
    return found


def _rows(code: ModuleType, batch: Any) -> int:  # noqa: ANN401
    """Return the rows of a batch: its first tensor's that has any."""
    dims = _dims(code)
    sizes: list[int] = []

    def note(tensor: Tensor, key: object) -> Tensor:
        dim = dims.get(key, 0)
        sizes.extend([tensor.shape[dim]] if dim is not None and tensor.dim() else [])
        return tensor

    _mapped(batch, note)
    return sizes[0]


def _mapped(batch: Any, change: Callable[[Tensor, object], Tensor], key: object = None) -> Any:  # noqa: ANN401
    """Change every tensor; `key` is the entry of the batch that it is in."""
    if isinstance(batch, Tensor):
        return change(batch, key)
    if isinstance(batch, Mapping):
        return {k: _mapped(v, change, k if key is None else key) for k, v in batch.items()}
    if isinstance(batch, list | tuple):
        made = [_mapped(v, change, i if key is None else key) for i, v in enumerate(batch)]
        return made if isinstance(batch, list) else getattr(type(batch), "_make", tuple)(made)
    return batch


def main() -> None:
    """Train, and leave the outcome in a folder."""
    path, folder, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.save(train(path, count), folder / "loop.pt")


if __name__ == "__main__":
    main()
