"""The user's training loop in plain PyTorch: what everything else is compared with.

A fresh `model()`, put into train mode as its user would, has its hooks and the user's own optimizer
over the whole model. Each batch is `loss.backward()` of its micro-batches and `optimizer.step()`.
It runs in a process of its own, forked before any model file was run. What it knows of
this product is the contract of a model file: no trace, no graph, no stage.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigbrain_fx.core import LossCount
from bigbrain_fx.frontend import (
    Call,
    ModelFile,
    Results,
    Route,
    UserStep,
    call_of,
    load_model_file,
    module_name,
    route,
    settle,
)
from bigbrain_fx.verification import laid_tensors, plain_batches
from bigbrain_fx.verification.draws import LOOP, reseed


@dataclass(frozen=True)
class Wanted:
    """Settings of a plain loop.

    Attributes:
        location: of the model file.
        seed: of model, data and draws.
        micro_batches: parts of a batch.
        start: a safetensors file with numbers to put into the model first, by name.
        exact: in float64, one step at a time from a given state, without an optimizer.
        rounded: weights, by name, that a bundle has in int8: rounded as such before anything else.
        divided: entries that count what a batch has, of which each micro-batch has its part.
        varying: entries of another shape in each batch, which nobody cuts.
        lengths: entries that are shorter in some batches -> in which of their dimensions.
        offsets: entries that hold offsets into the rows laid end to end -> positions of all rows.
        loss_count: by which micro-batches weigh, where the model file has no `loss_weight`.
        call: of a bundle that runs the user's own step: how a batch reaches forward; else empty.
        entries: of such a one: where the rows of each tensor of a batch are, None for nowhere.
        rows: of such a one's full batches.
        replicas: of such a one: the micro-batches of each; empty: there is one.
    """

    location: str
    seed: int
    micro_batches: int
    start: str = ""
    exact: bool = False
    rounded: tuple[str, ...] = ()
    loss_count: LossCount | None = None
    offsets: Mapping[plain_batches.Path_, int] = field(default_factory=dict)
    lengths: Mapping[plain_batches.Path_, tuple[int, ...]] = field(default_factory=dict)
    divided: tuple[plain_batches.Path_, ...] = ()
    varying: tuple[plain_batches.Path_, ...] = ()
    call: Call = ()
    entries: Mapping[plain_batches.Path_, int | None] = field(default_factory=dict)
    rows: int = 0
    replicas: tuple[tuple[int, ...], ...] = ()


def load_there(wanted: Wanted) -> ModelFile:
    """Run the model file; `forward` may import from its folder, too."""
    file = load_model_file(
        wanted.location, seed=wanted.seed, example="unused" if wanted.call else "traced"
    )
    sys.path.insert(0, str(file.path.parent))
    return file


class TrainingLoop:
    """The loop, step by step.

    Args:
        wanted: what loop.
        load: returns what is trained.
    """

    draws = LOOP  # the place of a micro-batch's random numbers

    def __init__(self, wanted: Wanted, load: Callable[[Wanted], ModelFile] = load_there) -> None:
        self.wanted = wanted
        self.file = load(wanted)
        self.model = self.file.model
        _round_weights(self.model, wanted.rounded)
        if wanted.exact:
            self.model.double()
        if wanted.start:
            put(self.model, laid_tensors.read(Path(wanted.start)))
        self.model.train()
        self.model.zero_grad(set_to_none=True)  # a module in memory has those of earlier steps
        self.data = plain_batches.drawn(self.file, wanted.seed)
        self.split = plain_batches.split_entries(
            self.file.example_batch, self.file.batch_dims, {*wanted.offsets, *wanted.varying}
        )
        self.pad = plain_batches.padding(
            self.file.example_batch,
            self.file.pad,
            self.split,
            wanted.lengths,
            self.file.lengths or (),
        )
        self.step, self.batch = -1, self.file.example_batch
        self.none: list[int] = []  # micro-batches that count nothing in this step
        self.results: list[Results] | None = None  # of modules, a list where they are noted
        self._settle_route()
        self.optimizer = None if wanted.exact else self._optimizer()
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        self.base_lr: list[Any] = [group.get("lr") for group in groups]
        make = self.file.scheduler
        self.scheduler = make(self.optimizer) if make and self.optimizer else None
        self.scaler = _scaler(self.file) if self.optimizer else _scaler(None)

    def _settle_route(self) -> None:
        """Let a tuple's targets reach forward where the loss function has no loss without them."""
        example, has_loss = self.file.example_batch, self.file.loss is not None
        how = route(self.model, example, has_loss)
        how = settle(self.model, how, example, self._gives_loss) if has_loss else how
        self.user = self._user_step(self.model, how)

    def _user_step(self, model: nn.Module, how: Route) -> UserStep:
        call = call_of(model, self.file.example_batch, how)
        autocast = None if self.wanted.exact else self.file.autocast
        return UserStep(model, self.file.loss, call, autocast)

    def _gives_loss(self, how: Route) -> bool:
        """Whether a loss comes out when the example reaches forward this way; leaves no trace."""
        with torch.random.fork_rng(), contextlib.suppress(Exception):
            self._user_step(copy.deepcopy(self.model), how).loss_of(self.file.example_batch)
            return True
        return False

    def _optimizer(self) -> torch.optim.Optimizer:
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        own = self.file.optimizer
        return torch.optim.AdamW(named) if own is None else own(named)

    def run_step(self, folder: Path) -> dict[str, object]:
        """Run one training step; leave what it did in a folder.

        `state` holds all tensors before it, `inputs` its micro-batches, `after` all tensors at the
        end. `gradients` are those after the hooks, before clipping and times the loss scale.
        """
        assert self.optimizer is not None
        laid_tensors.save(self.state(), folder / "state")
        batches = self.micro_batches(self.step + 1)
        laid_tensors.save(plain_batches.inputs(batches), folder / "inputs")
        losses = self.forward_and_backward(batches)
        weights = self._step_weights(batches) if self._counts() else None
        laid_tensors.save(self.gradients(), folder / "gradients")
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else None
        self._update()
        laid_tensors.save(self.state(), folder / "after")
        return {"losses": losses, "scale": scale, "weights": weights}

    def run_noting(self, folder: Path) -> dict[str, object]:
        """Run one training step; leave in `results` what each module gave in each micro-batch."""
        self.results = []
        found = self.run_step(folder)
        laid_tensors.save(
            {
                f"{micro}/{path}/{call}/{place}": tensor
                for micro, results in enumerate(self.results)
                for (path, call), tensors in results.of.items()
                for place, tensor in enumerate(tensors)
            },
            folder / "results",
        )
        self.results = None
        return found

    def run_exactly(self, step: int, state: str, folder: Path) -> dict[str, object]:
        """Leave the gradients of one step in float64, from the given tensors."""
        put(self.model, laid_tensors.read(Path(state)))
        self.model.zero_grad(set_to_none=True)
        batches = [
            plain_batches.tensors_of(batch, plain_batches.wide)
            for batch in self.micro_batches(step)
        ]
        losses = self.forward_and_backward(batches)
        laid_tensors.save(self.gradients(), folder / "exact")
        return {"losses": losses}

    def micro_batches(self, step: int) -> list[object]:
        """Read on to the batch of a step; return its parts."""
        while self.step < step:
            self.batch = self._next()
            self.step += 1
        return self._parts()

    def _parts(self) -> list[object]:
        if self.file.micro is not None and self.wanted.micro_batches > 1:
            found = self.file.micro(self.batch, self.wanted.micro_batches)
            return self._weighty(list(found)) if self._counts() else list(found)
        count = min(self.wanted.micro_batches, self._rows(self.batch) or sys.maxsize)
        how = count, self.wanted.offsets
        found = [
            plain_batches.tensors_of(self.batch, plain_batches.part_of(self.split, m, *how))
            for m in range(count)
        ]
        found = self._divided(found)
        return self._weighty(found) if self._counts() else found

    def _divided(self, batches: list[object]) -> list[object]:
        """Give each micro-batch its part of what counts the batch."""
        rows = [self._rows(batch) for batch in batches]
        for path in self.wanted.divided:
            batches = [
                plain_batches.divided(batch, path, own, sum(rows))
                for batch, own in zip(batches, rows, strict=True)
            ]
        return batches

    def _counts(self) -> Callable[[object], object] | None:
        """Return the count by which micro-batches weigh; None where they weigh by their rows."""
        own = self.wanted.loss_count
        return self.file.loss_weight or (None if own is None else own.of)

    def _weights(self, batches: Sequence[object]) -> list[float]:
        """Return by what each micro-batch weighs."""
        count = self._counts()
        if self.file.micro is not None and count is None:
            return [1.0] * len(batches)
        return [float(self._rows(b) if count is None else count(b)) for b in batches]  # type: ignore[arg-type]

    def _step_weights(self, batches: Sequence[object]) -> list[float]:
        """Return the weights of a step; those in whose place another runs have none."""
        found = self._weights(batches)
        return [0.0 if micro in self.none else weight for micro, weight in enumerate(found)]

    def _weighty(self, batches: list[object]) -> list[object]:
        """Put another in the place of one that counts nothing: a mean over nothing is NaN."""
        weights = self._weights(batches)
        some = next(b for b, weight in zip(batches, weights, strict=True) if weight)
        self.none = [m for m, weight in enumerate(weights) if not weight]
        return [some if m in self.none else batch for m, batch in enumerate(batches)]

    def _rows(self, batch: object) -> int:
        """Return how many rows a batch has; none where no entry is split."""
        found: list[int] = []

        def note(tensor: Tensor, path: plain_batches.Path_) -> Tensor:
            found.extend([tensor.shape[self.split[path]]] if path in self.split else [])
            return tensor

        plain_batches.tensors_of(batch, note)
        if len(set(found)) > 1:
            raise ValueError(f"the entries of a batch have {found} rows")
        return found[0] if found else 0

    def _next(self) -> object:
        """Draw a batch; leave out a smaller one where the file says so."""
        full = self._rows(self.file.example_batch)
        batch = next(self.data)
        while self.file.drop_last and self._rows(batch) < full:
            batch = next(self.data)
        return plain_batches.tensors_of(batch, self.pad)

    def forward_and_backward(self, batches: Sequence[object]) -> list[float]:
        """Return the mean loss, and those of the micro-batches; each draws by a seed of its own."""
        losses, weights = [], self._step_weights(batches)
        for micro, batch in enumerate(batches):
            reseed((self.wanted.seed, self.step, micro), self.draws)
            with self._noting():
                loss = self.user.loss_of(batch)
            self.scaler.scale(plain_batches.share(loss, weights, micro)).backward()
            losses.append(loss.detach().reshape(()))
            self._take_gradients(micro)
        return [float(loss) for loss in (plain_batches.mean(losses, weights), *losses)]

    def _take_gradients(self, micro: int) -> None:
        """Leave the gradients of a micro-batch where the next ones are added."""

    def _noting(self) -> contextlib.AbstractContextManager[object]:
        if self.results is None:
            return contextlib.nullcontext()
        self.results.append(Results())
        return self.results[-1].noted(self.model)

    def _update(self) -> None:
        self._clip()
        self._step()

    def _clip(self) -> None:
        assert self.optimizer is not None
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        most = self._clip_norm()
        if most is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)

    def _clip_norm(self) -> float | None:
        """Return what the file says now: a loop reads it anew in each step."""
        module = sys.modules.get(module_name(self.file))
        most: float | None = getattr(module, "clip_norm", self.file.clip_norm)
        return most

    def _step(self, *closure: Callable[[], Tensor]) -> None:
        assert self.optimizer is not None
        if self.file.lr_scale is not None:
            scale = self.file.lr_scale(self.step)
            for group, lr in zip(self.optimizer.param_groups, self.base_lr, strict=True):
                group["lr"] = lr * scale
        self.scaler.step(self.optimizer, *closure)
        self.scaler.update()
        self._advance_scheduler()
        self.model.zero_grad(set_to_none=True)  # an optimizer may have some of them only

    def _advance_scheduler(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def state(self) -> dict[str, Tensor]:
        """Return every parameter and buffer by its first name."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def gradients(self) -> dict[str, Tensor]:
        """Return what gradients there are, by the parameter's first name."""
        named = self.model.named_parameters()
        return {name: p.grad.to_dense() for name, p in named if p.grad is not None}


def _scaler(file: ModelFile | None) -> torch.amp.GradScaler:
    """Return torch's own; where the file has none it does nothing."""
    given: Any = (file.grad_scaler if file else None) or {"enabled": False}
    return torch.amp.GradScaler("cpu", **given)


def put(model: nn.Module, numbers: Mapping[str, Tensor]) -> None:
    """Put numbers into a model's parameters and buffers, by any of their names."""
    held = {**dict(model.named_buffers(remove_duplicate=False)), **dict(_all_parameters(model))}
    with torch.no_grad():
        for name, value in numbers.items():
            if name in held:
                held[name].copy_(value)


@torch.no_grad()
def _round_weights(model: nn.Module, names: Sequence[str]) -> None:
    """Round each row of a weight to 255 numbers that are alike on both sides of zero.

    Written from the words of docs/how-to/hugging-face.md, row by row; it shares nothing with
    `split`.
    """
    for name in names:
        for row in model.get_parameter(name):
            largest = row.abs().max().float()
            unit = (largest / 127).to(row.dtype)
            if float(unit) <= 0:  # as small as what its type cannot divide
                unit = torch.ones((), dtype=row.dtype)
            steps = (row.float() / unit.float()).round().clamp(min=-127, max=127)
            row.copy_(steps.to(row.dtype) * unit)


def _all_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)
