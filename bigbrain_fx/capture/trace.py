"""nn.Module -> Graph: wrap the model, export it, translate it, and compare the two.

The room's first door. It knows torch.export; it knows nothing of devices, stages or emitted code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from bigbrain_fx.capture.batch import Batch, take_apart, to_meta
from bigbrain_fx.capture.check import Trial, affordable
from bigbrain_fx.capture.dice import random_state_kept, rolls, where_rolled
from bigbrain_fx.capture.export import ambient, explain, export_step, quiet, without_gc
from bigbrain_fx.capture.opaque import recording
from bigbrain_fx.capture.params import tensor_names
from bigbrain_fx.capture.sources import where
from bigbrain_fx.capture.step import Loss, Step, input_names, route
from bigbrain_fx.capture.translate import Labels, translate
from bigbrain_fx.core import Graph
from bigbrain_fx.errors import BigBrainError, CaptureError, InputError


@dataclass(frozen=True)
class Captured:
    """A captured model: the graph, and the real things it stands for.

    Attributes:
        graph: sizes are arithmetic over "B" unless `graph.static_batch` is set.
        tensors: parameters, buffers and constants by name; the user's own, not copies.
        functions: classes behind `opaque.` targets.
        warnings: what the user should know, one sentence each.
        batch: the example batch, taken apart.
    """

    graph: Graph
    tensors: Mapping[str, Tensor]
    functions: Mapping[str, type]
    warnings: tuple[str, ...]
    batch: Batch

    def inputs(self, rows: int | None = None) -> dict[str, Tensor]:
        """Return the example batch by input name, with `rows` rows (its own when left out)."""
        return self.batch.sized(self.batch.rows if rows is None else rows)


def capture(
    module: nn.Module,
    example_batch: object,
    loss: Loss | None = None,
    *,
    training: bool = True,
    name: str | None = None,
    micro_batch: int | None = None,
    autocast: str | None = None,
) -> Captured:
    """Trace a module to a graph, without strictness and with a free batch size.

    The graph computes (loss, outputs): the loss is `loss(output, batch)`, else the scalar output,
    else `output.loss`, else there is none (inference).
    How the batch reaches forward: see `step.route`.
    Where the batch size cannot stay free, the graph holds for one size: `micro_batch`, else the
    example's; `graph.static_batch` says so. On the meta device nothing is compared.

    Args:
        module: traced in train mode (eval mode without `training`); its own modes come back.
        example_batch: tensor, dict, tuple or list, nested at will; dimension 0 is the batch.
        loss: what to train on.
        training: whether dropout and batch norm behave as in training.
        name: name of the graph, the class's when left out.
        micro_batch: rows of a micro-batch, for a trace of fixed size.
        autocast: "bfloat16" or "float16": forward and loss run under torch.autocast.

    Raises:
        InputError: the batch does not fit forward, or the module fails on it.
        CaptureError: torch.export cannot follow the module; names the user's line.
    """
    on_meta = any(t.device.type == "meta" for t in (*module.parameters(), *module.buffers()))
    example_batch = to_meta(example_batch) if on_meta else example_batch
    how = route(module, example_batch, loss is not None)
    names = input_names(module, example_batch, how)
    batch = take_apart(example_batch, names, tensor_names(module))
    labels = Labels(name or type(module).__name__, batch.rows, training, autocast)
    modes = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        with torch.device("meta") if on_meta else nullcontext(), without_gc():
            return _Job(Step(module, loss, batch, how), batch, labels, on_meta).run(micro_batch)
    finally:
        for part, mode in modes:
            part.training = mode


@dataclass
class _Job:
    """One capture in the making."""

    step: Step
    batch: Batch
    labels: Labels
    on_meta: bool
    warnings: list[str] = field(default_factory=list)

    def run(self, micro_batch: int | None) -> Captured:
        """Try a free batch size, then a fixed one."""
        found, problem = self.free()
        if found is None:
            rows = micro_batch or self.batch.rows
            self.warnings.append(
                f"the trace holds for micro-batches of {rows} rows only: {problem}"
            )
            found = self.fixed(rows)
        return replace(found, warnings=tuple(dict.fromkeys(self.warnings)))

    def free(self) -> tuple[Captured | None, str]:
        """Trace with a free batch size and compare at two sizes; say why when it cannot be."""
        try:
            found = self.attempt(max(2, self.batch.rows), free=True)
        except Exception as error:  # whatever torch.export raises
            return None, str(explain(error).what)
        rows = (1, 3) if self.batch.rows != 3 else (1, 4)
        problem = self.problem(found, rows)
        return (found, "") if problem is None else (None, problem)

    def fixed(self, rows: int) -> Captured:
        """Trace with a fixed batch size and compare; explain what goes wrong."""
        try:
            found = self.attempt(rows, free=False)
        except Exception as error:
            raise self.own_fault(rows) or explain(error) from error
        wrong = self.problem(found, (rows,))
        if wrong is not None:
            raise CaptureError(
                f"the captured graph does not compute what the model computes: {wrong}",
                help="keep Python's random numbers, and state that is no buffer, out of forward",
            )
        return found

    def attempt(self, rows: int, free: bool) -> Captured:
        """Trace once."""
        tensors = list(self.batch.sized(rows).values())
        batched = [entry.batched and free for entry in self.batch.entries]
        with random_state_kept(), rolls() as rolled, recording() as recorder:
            program = export_step(self.step, tensors, batched, self.labels.autocast)
        if rolled:
            self.warn_of_dice(tensors)
        labels = replace(
            self.labels, static_rows=None if free else rows, has_loss=self.step.seen.has_loss
        )
        graph, store = translate(program, self.step.model, self.batch, recorder.calls, labels)
        functions = {call.target: call.function for call in recorder.calls.values()}
        return Captured(graph, store.tensors, functions, (), self.batch)

    def problem(self, found: Captured, rows: Sequence[int]) -> str | None:
        """Compare graph and module at batch sizes; return the first difference."""
        if self.on_meta:
            return None
        if not affordable(found.graph, rows):
            self.warnings.append(
                "too large to compare with the module here; `verify` compares them"
            )
            return None
        trial = Trial(self.step, found.graph, found.tensors, found.functions)
        for count in rows:
            with random_state_kept():
                wrong = trial.first_difference(self.batch.sized(count))
            if wrong is not None:
                return f"at {count} rows, {wrong}"
        return None

    def warn_of_dice(self, tensors: Sequence[Tensor]) -> None:
        """Say that random numbers of Python or NumPy are constants now, and name the line."""
        at = where_rolled(lambda: self._quiet_run(tensors))
        if at is None:
            return  # not the user's: an import that seeds something, say
        self.warnings.append(
            f"{at} draws random numbers with Python or NumPy: the trace keeps what it "
            "drew once; use torch.rand instead"
        )

    def _quiet_run(self, tensors: Sequence[Tensor]) -> None:
        cast_as_asked = ambient(self.labels.autocast, tensors)
        with quiet(), torch.no_grad(), torch.random.fork_rng(devices=[]), cast_as_asked:
            self.step(*tensors)

    def own_fault(self, rows: int) -> InputError | None:
        """Say when the module fails on its example batch without us, too."""
        if self.on_meta:
            return None
        try:
            self._quiet_run(list(self.batch.sized(rows).values()))
        except BigBrainError:
            return None
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            return InputError(
                f"the model fails on its example batch: {type(error).__name__}: {first}",
                at=where(error),
                help="make model()(example_batch()) run in plain PyTorch first",
            )
        return None
