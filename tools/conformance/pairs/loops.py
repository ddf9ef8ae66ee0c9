"""Reference loops for bundles of pairs, in plain PyTorch.

`plain` adds up micro-batches as any user does; `stale` is the recurrence of 2BW, in which a step
computes with the weights of one step before.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

Trained = tuple[list[float], dict[str, Tensor]]


def read(path: Path) -> ModuleType:
    """Run a model file, as `import` would."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    return code


def of(pair: str) -> Callable[[ModuleType, int, int], Trained]:
    """Return the loop that a pair trains as, by its name."""
    return stale if "Ab" in pair.split("+") else plain


def plain(code: ModuleType, micro_batches: int, steps: int) -> Trained:
    """Train; return the loss of each step, and all tensors at the end."""
    model, optimizer, losses = *_fresh(code), []
    for batch in itertools.islice(code.batches(0), steps):
        losses.append(_accumulated(code, model, batch, micro_batches))
        _clipped(code, model)
        optimizer.step()
        optimizer.zero_grad()
    return losses, _tensors(model)


def stale(code: ModuleType, micro_batches: int, steps: int) -> Trained:
    """Train with gradients of the weights of one step before."""
    model, optimizer, losses = *_fresh(code), []
    older = copy.deepcopy(model)
    for batch in itertools.islice(code.batches(0), steps):
        losses.append(_accumulated(code, older, batch, micro_batches))
        for weight, seen in zip(model.parameters(), older.parameters(), strict=True):
            weight.grad, seen.grad = seen.grad, None
        older.load_state_dict(model.state_dict())
        optimizer.step()
        optimizer.zero_grad()
    return losses, _tensors(model)


def _fresh(code: ModuleType) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = code.model().train()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return model, code.optimizer(trained)


def _accumulated(code: ModuleType, model: nn.Module, batch: Any, count: int) -> float:  # noqa: ANN401
    seen = []
    for part in _parts(batch, count):
        kind = getattr(code, "autocast", None)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind is not None):
            loss = code.loss(model(part["letters"]), part)
        (loss / count).backward()
        seen.append(loss.detach())
    return float(torch.stack(seen).mean())


def _clipped(code: ModuleType, model: nn.Module) -> None:
    if hasattr(code, "clip_norm"):
        nn.utils.clip_grad_norm_(model.parameters(), code.clip_norm)


def _parts(batch: dict[str, Tensor], count: int) -> Iterator[dict[str, Tensor]]:
    for number in range(count):
        yield {name: rows.chunk(count)[number] for name, rows in batch.items()}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}
