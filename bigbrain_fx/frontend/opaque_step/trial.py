"""A trial of one training step in eager PyTorch, run in a fork: success and cost.

Weights, counters and files of this process stay as they are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.forked import apart
from bigbrain_fx.frontend.opaque_step.user_step import Call, UserStep, call_of
from bigbrain_fx.frontend.tracing.executor.allocations import LiveBytes
from bigbrain_fx.frontend.tracing.plain import seed_python
from bigbrain_fx.frontend.tracing.step import Route, parameters_of, route
from bigbrain_fx.frontend.translation.sources import where
from bigbrain_fx.runtime import needs_closure

if TYPE_CHECKING:
    from bigbrain_fx.frontend.modelfile import ModelFile

_Result = TypeVar("_Result")

LIMIT_S = 120.0
_QUICK_S = 10.0  # a step that takes longer is not run again to be measured


@dataclass(frozen=True)
class StepCost:
    """Costs of one step on the example batch.

    Attributes:
        dtype: of the loss.
        flops: of forward and loss.
        saved: bytes that the backward needs, parameters and batch left out.
        forward, backward: the most bytes that forward holds, and that backward adds to `saved`.
    """

    dtype: str = "float32"
    flops: int | None = None
    saved: int = 0
    forward: int = 0
    backward: int = 0


def try_step(file: ModelFile, seed: int) -> tuple[Call, StepCost]:
    """Run one step on the example batch in a fork; return how a batch reaches forward, and costs.

    Raises:
        InputError: eager PyTorch does not train it, either.
    """
    has_loss = file.loss is not None
    how, batch = route(file.model, file.example_batch, has_loss), file.example_batch
    calls = [call_of(file.model, batch, each) for each in (how, *_wider(file, how))]
    answers = []
    for call in calls:
        step = UserStep(file.model, file.loss, call, file.autocast)
        answer = asked(partial(_train, step, file, seed))
        if "error" not in answer:
            return call, _cost(step, file, seed, answer)
        answers.append(answer)
    raise InputError(
        f"one step in eager PyTorch fails, too: {answers[0]['error']}",
        code="BX2195",
        at=str(answers[0]["at"]) or None,
        help="let a plain loop train the model first",
    )


def _wider(file: ModelFile, how: Route) -> list[Route]:
    """Return the route by which forward gets a tuple's targets, too, where there is a loss."""
    batch = file.example_batch
    if how.whole or not isinstance(batch, tuple | list) or file.loss is None:
        return []
    takes = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
                for p in parameters_of(file.model))  # fmt: skip
    wider = replace(how, positions=min(takes, len(batch)))
    return [wider] if wider.positions > how.positions else []


def asked(work: Callable[[], Mapping[str, str]]) -> dict[str, object]:
    """Return a fork's answer by `answer_of`; nothing where the fork takes too long, or ends."""
    found = apart(work, LIMIT_S)
    return json.loads(found["found"]) if found else {}


def answer_of(found: Mapping[str, object]) -> Mapping[str, str]:
    """Return a fork's answer, in the fork; `asked` is the parent's side."""
    return {"found": json.dumps(found)}


def _train(step: UserStep, file: ModelFile, seed: int) -> Mapping[str, str]:
    """Train one step; return its time, or the error."""
    started_s = time.monotonic()
    try:
        batch = _prepared(step, file, seed)
        optimizer, _ = made_optimizer(file)
        losses = list[Tensor]()

        def compute() -> Tensor:
            step.model.zero_grad(set_to_none=True)
            losses.append(step.loss_of(batch))
            losses[-1].backward()
            return losses[-1].detach()

        if needs_closure(optimizer):
            optimizer.step(compute)  # type: ignore[arg-type]  # a tensor, as torch's own examples
        else:
            compute()
            optimizer.step()
        loss = losses[0]
    except Exception as error:  # the user's own code
        return _failed(file, error)
    dtype = str(loss.dtype).removeprefix("torch.")
    return answer_of({"dtype": dtype, "seconds": time.monotonic() - started_s})


def _failed(file: ModelFile, error: Exception) -> Mapping[str, str]:
    first = (str(error).splitlines() or [""])[0]
    at = where(error, Path(file.path).parent) or ""
    return answer_of({"error": f"{type(error).__name__}: {first[:300]}", "at": at})


def require_optimizer(file: ModelFile) -> None:
    """Make the optimizer in a fork, where no step can be tried: the model has no numbers.

    Raises:
        InputError: that fails.
    """

    def make() -> Mapping[str, str]:
        try:
            made_optimizer(file)
        except Exception as error:  # the user's own code
            return _failed(file, error)
        return answer_of({})

    answer = asked(make)
    if "error" in answer:
        raise InputError(
            f"the optimizer cannot be made in eager PyTorch, either: {answer['error']}",
            code="BX2196",
            at=str(answer["at"]) or None,
            help="let a plain loop make it first",
        )


def _prepared(step: UserStep, file: ModelFile, seed: int) -> object:
    """Seed all generators; return the first batch that is trained on."""
    torch.manual_seed(seed)
    seed_python(seed)
    step.model.train()
    return file.example_batch if file.batches is None else next(iter(file.batches(seed)))


def made_optimizer(
    file: ModelFile,
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler | None]:
    """Return the optimizer and scheduler of a loop, made as a model file says."""
    named = [(n, p) for n, p in file.model.named_parameters() if p.requires_grad]
    made = file.optimizer(named) if file.optimizer else torch.optim.AdamW(named)
    return made, None if file.scheduler is None else file.scheduler(made)


def _cost(step: UserStep, file: ModelFile, seed: int, answer: Mapping[str, object]) -> StepCost:
    dtype = str(answer.get("dtype", "float32"))
    if float(str(answer.get("seconds", LIMIT_S))) > _QUICK_S:
        return StepCost(dtype)
    found = asked(partial(_measure, step, file, seed))
    return StepCost(dtype, **found)  # type: ignore[arg-type]  # integers, by `_measure`


def _measure(step: UserStep, file: ModelFile, seed: int) -> Mapping[str, str]:
    """Count operations and bytes of a step; nothing where a mode of torch's does not go with it."""
    live = LiveBytes()
    try:
        batch = _prepared(step, file, seed)
        tensors = (t for t in tree_leaves(batch) if isinstance(t, Tensor))
        live.ignore((*step.model.parameters(), *step.model.buffers(), *tensors))
        with FlopCounterMode(display=False) as counter, live:
            loss = step.loss_of(batch)
            saved, forward, flops = live.now, live.peak, counter.get_total_flops()
            live.reset_peak()
            loss.backward()
    except Exception:  # torch.func and TorchScript, say, do not know of modes
        return answer_of({})
    backward = max(0, live.peak - saved)
    return answer_of({"flops": flops, "saved": saved, "forward": forward, "backward": backward})


def done_apart(work: Callable[[], _Result], otherwise: _Result) -> _Result:
    """Return a fork's result, or a substitute where the fork takes too long, or ends.

    Result and substitute are of one dataclass.
    """
    adapter = TypeAdapter(type(otherwise))
    found = apart(lambda: {"found": adapter.dump_json(work()).decode()}, LIMIT_S)
    return adapter.validate_json(found["found"]) if found else otherwise
