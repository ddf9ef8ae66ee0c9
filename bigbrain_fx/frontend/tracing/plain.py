"""Run the user's step as plain PyTorch, then restore buffers, random generators and modes.

This file knows steps; it knows nothing of graphs or of tracing.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.tracing.export import ambient, quiet
from bigbrain_fx.frontend.tracing.state.python_rng import random_state_kept
from bigbrain_fx.frontend.translation.batch import Batch
from bigbrain_fx.frontend.translation.sources import forward_line

Numbers = tuple[Tensor | None, ...]

_MOST = 2**28  # bytes of frozen parameters that are copied: a large frozen body is not written into


@dataclass(frozen=True)
class Plain:
    """Inputs of a plain run: the step, and its casts."""

    step: Callable[..., tuple[Tensor, ...]]
    model: nn.Module
    autocast: str | None

    def run(
        self, tensors: Sequence[Tensor], seed: int, python_seed: int | None = None
    ) -> tuple[Tensor, ...]:
        """Run once with gradients enabled; torch is seeded with `seed`, Python and NumPy, too.

        Args:
            tensors: of the batch; the run gets copies.
            seed: of torch.
            python_seed: of Python and NumPy, `seed` when left out.

        Raises:
            Exception: whatever the model raises.
        """
        with self.seeded(tensors, seed, python_seed) as copies:
            return tuple(tensor.detach() for tensor in self.step(*copies))

    def gradients(self, tensors: Sequence[Tensor], seed: int) -> tuple[Tensor | None, ...]:
        """Run once and return the results, and the first result's gradients where it has any."""
        with self.seeded(tensors, seed, seed) as copies:
            return self._with_gradients(copies)

    def loss_and_gradients(
        self, tensors: Sequence[Tensor], seed: int, share: float = 1.0
    ) -> tuple[Tensor, Numbers]:
        """Run once and return the loss, and the gradient of each trained parameter.

        `share` is what the backward begins with, as a micro-batch's does. A backward of the user's
        own may add or bound something whatever that is.

        Raises:
            Exception: whatever the model raises.
        """
        wanted = [p for p in self.model.parameters() if p.requires_grad]
        with contextlib.suppress(RuntimeError), self.seeded(tensors, seed, seed) as copies:
            loss = self.step(*copies)[0]
            begin = torch.full_like(loss, share)
            return loss.detach(), torch.autograd.grad(loss, wanted, begin, allow_unused=True)
        with self.seeded(tensors, seed, seed) as copies:  # a reentrant checkpoint needs backward()
            loss = self.step(*copies)[0]
            return loss.detach(), gradients_of(loss, wanted, torch.full_like(loss, share))

    def after(
        self, before: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], seed: int
    ) -> tuple[Tensor, Numbers]:
        """Run other batches with their writes; then do as `loss_and_gradients`.

        Raises:
            Exception: the model's own error.
        """
        in_turn = getattr(self.step, "in_turn", contextlib.nullcontext)
        with state_kept(self.model), in_turn():
            for batch in before:
                with self._running(batch, seed, seed) as copies:
                    self.step(*copies)
            return self.loss_and_gradients(tensors, seed)

    def left(
        self, tensors: Sequence[Tensor], seed: int, buffers: Collection[str] | None = None
    ) -> Numbers:
        """Run once; return the results of `gradients`, then buffers and frozen weights.

        Args:
            tensors: of the batch; the run gets copies.
            seed: of all generators.
            buffers: by name, those that count; None: all.
        """
        with self.seeded(tensors, seed, seed) as copies:
            found = self._with_gradients(copies)
            return (*found, *self._kept(buffers))

    def _kept(self, buffers: Collection[str] | None) -> Iterator[Tensor]:
        named = self.model.named_buffers()
        counting = (t for name, t in named if buffers is None or name in buffers)
        return (tensor.detach().clone() for tensor in (*counting, *_frozen(self.model)))

    def _with_gradients(self, copies: Sequence[Tensor]) -> Numbers:
        found = self.step(*copies)
        wanted = [p for p in self.model.parameters() if p.requires_grad]
        numbers = tuple(tensor.detach() for tensor in found)
        if not (wanted and found and found[0].dim() == 0 and found[0].requires_grad):
            return numbers
        return (*numbers, *torch.autograd.grad(found[0], wanted, allow_unused=True))

    @contextlib.contextmanager
    def seeded(
        self, tensors: Sequence[Tensor], seed: int, python_seed: int | None = None
    ) -> Iterator[list[Tensor]]:
        """Seed torch, Python and NumPy; yield copies of the tensors; put all state back."""
        with state_kept(self.model), self._running(tensors, seed, python_seed) as copies:
            yield copies

    @contextlib.contextmanager
    def _running(
        self, tensors: Sequence[Tensor], seed: int, python_seed: int | None
    ) -> Iterator[list[Tensor]]:
        """Seed torch, Python and NumPy; yield copies of the tensors; writes of the run stay."""
        copies = [tensor.clone() for tensor in tensors]
        with quiet(), ambient(self.autocast, copies), torch.enable_grad():
            torch.default_generator.manual_seed(seed)
            seed_python(seed if python_seed is None else python_seed)
            yield copies


def gradients_of(
    loss: Tensor, wanted: Sequence[Tensor], begin: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `loss.backward(begin)`; every tensor keeps the one that it had.

    The loss may reach others, too: those of another model of the user's.
    """
    before = [(tensor, tensor.grad) for tensor in (*wanted, *_leaves(loss))]
    try:
        for tensor, _ in before:
            tensor.grad = None
        loss.backward(begin)
        return tuple(tensor.grad for tensor in wanted)
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors in which a backward of the loss leaves gradients."""
    waiting, seen = [loss.grad_fn], set[object]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
        waiting += [each for each, _ in node.next_functions]


@contextlib.contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Restore every buffer, frozen weight and random state of a model at the end."""
    frozen = [(p, p.detach(), p.detach().clone()) for p in _frozen(model)]
    kept = [
        (part, name, tensor, tensor.detach(), tensor.detach().clone())
        for part in model.modules()
        for name, tensor in part._buffers.items()
        if tensor is not None
    ]
    with random_state_kept(), torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            with torch.no_grad():
                for part, name, tensor, memory, numbers in kept:
                    _require_shape(part, name, tensor, numbers)
                    _require_order(part, name, tensor, memory.stride())
                    _put_back(tensor, memory, numbers)
                    part._buffers[name] = tensor
                for parameter, memory, numbers in frozen:
                    _put_back(parameter, memory, numbers)


def _put_back(tensor: Tensor, memory: Tensor, numbers: Tensor) -> None:
    """Give a tensor the memory that it had, and that its numbers: `.data` may have changed both."""
    if tensor.data_ptr() != memory.data_ptr():
        tensor.data = memory
    if not torch.equal(tensor, numbers):
        tensor.copy_(numbers)


def _require_shape(part: nn.Module, name: str, tensor: Tensor, before: Tensor) -> None:
    if tensor.shape != before.shape:
        raise CaptureError(
            f"forward gives the buffer {name} of {type(part).__name__} another shape: "
            f"{tuple(tensor.shape)} for {tuple(before.shape)}",
            code="BX0160c",
            at=forward_line(part),
            help="give it that shape in __init__; or run the model once where it is made: def "
            "model(): made = Net(); made(example_batch()['x']); return made",
        )


def _require_order(part: nn.Module, name: str, tensor: Tensor, strides: tuple[int, ...]) -> None:
    """Refuse ops that permute a buffer in place (t_, transpose_): no numbers are written."""
    if tensor.stride() != strides:
        raise CaptureError(
            f"forward turns the buffer {name} of {type(part).__name__} round in place "
            "(t_(), transpose_(), also on what .contiguous() gives, which may be the buffer "
            "itself), and no graph holds that",
            code="BX0160d",
            at=forward_line(part),
            help=f"compute with a view: self.{name}.t() for self.{name}.t_(); to have it turned in "
            f"the next call, too, write the numbers: self.{name}.copy_(self.{name}.t().clone())",
        )


def _frozen(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that forward may write into: a momentum encoder's; none if large."""
    found = [p for p in model.parameters() if not p.requires_grad]
    return found if sum(p.nbytes for p in found) <= _MOST else []


def seed_python(seed: int) -> None:
    """Seed the global generators of Python and NumPy."""
    random.seed(seed)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(seed)


def another(batch: Batch, rows: int, seed: int) -> list[Tensor]:
    """Return a batch other than the example: other rows of it, and other numbers where any will do.

    Rows are drawn from the example's. Floats of both signs are drawn anew with their own mean and
    spread. Other numbers, such as masks and tokens, stay.
    """
    dice = torch.Generator().manual_seed(seed)
    picked = torch.randint(batch.rows, (rows,), generator=dice)
    return [
        _mixed(entry.tensor, picked, dice) if entry.batched else entry.tensor
        for entry in batch.entries
    ]


def _mixed(tensor: Tensor, picked: Tensor, dice: torch.Generator) -> Tensor:
    rows = tensor[picked]
    if not tensor.is_floating_point() or not rows.numel() or float(tensor.min()) >= 0:
        return rows
    noise = torch.randn(rows.shape, generator=dice).to(rows.dtype)
    return noise * tensor.float().std().nan_to_num().to(rows.dtype) + tensor.mean()


def alike(first: Sequence[object], second: Sequence[object]) -> bool:
    """Whether two runs gave the same numbers, but for rounding; or made the same calls."""
    return len(first) == len(second) and all(map(_same, first, second))


def _same(one: object, other: object) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one == other if isinstance(one, tuple) else same_numbers(one, other)
    if one.shape != other.shape or one.is_sparse:
        return one.shape == other.shape
    return same_numbers(one, other) or torch.allclose(one, other, 1e-5, 1e-7, equal_nan=True)


def same_numbers(found: object, want: object) -> bool:
    """Whether two tensors are equal bit by bit (NaN equals NaN)."""
    if not isinstance(found, Tensor) or not isinstance(want, Tensor):
        return found is want
    if found.shape != want.shape or found.dtype != want.dtype:
        return False
    return torch.equal(found, want) or bool(
        ((found == want) | ((found != found) & (want != want))).all()
    )
