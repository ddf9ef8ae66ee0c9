"""nn.Module -> Graph: wrap the model, export it, translate it, and compare the two.

The room's first door. It knows torch.export; it knows nothing of devices, stages or emitted code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bigbrain_fx.capture.arguments import noting_arguments, with_hints
from bigbrain_fx.capture.batch import Batch, take_apart, to_meta
from bigbrain_fx.capture.blank import is_blank
from bigbrain_fx.capture.check import BACKWARD, Trial, affordable
from bigbrain_fx.capture.dice import random_state_kept, rolls
from bigbrain_fx.capture.export import ambient, export_step, quiet, without_gc
from bigbrain_fx.capture.ladder import Ladder
from bigbrain_fx.capture.leaf import find_leaves
from bigbrain_fx.capture.leaf_trace import Leaves
from bigbrain_fx.capture.odds import without_settled, wrong_bet
from bigbrain_fx.capture.opaque import recording
from bigbrain_fx.capture.oracle import AssumptionError, Oracle
from bigbrain_fx.capture.params import tensor_names
from bigbrain_fx.capture.plain import Plain
from bigbrain_fx.capture.refusals import (
    explain,
    is_final,
    last_rows,
    may_be_loss,
    undecided,
    with_loss_remedy,
)
from bigbrain_fx.capture.saves import with_saves
from bigbrain_fx.capture.sources import where
from bigbrain_fx.capture.step import Loss, Step, input_names, route, without_fast_path
from bigbrain_fx.capture.translate import Labels, translate
from bigbrain_fx.core import Graph
from bigbrain_fx.errors import BigBrainError, CaptureError, InputError


@dataclass(frozen=True)
class Captured:
    """A captured model: the graph, and the real things it stands for.

    Attributes:
        graph: sizes are arithmetic over "B" unless `graph.static_batch` is set.
        tensors: parameters, buffers and constants by name; the user's own, not copies.
        functions: the user's own Python behind `opaque.`, `leaf.` and `user.` targets.
        warnings: what the user should know, one sentence each.
        batch: the example batch, taken apart.
    """

    graph: Graph
    tensors: Mapping[str, Tensor]
    functions: Mapping[str, object]
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
    assume: Mapping[str, bool] | None = None,
    leaves: Sequence[str] = (),
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
        training: whether dropout and batch norm behave as in training. Without it there is no
            loss: `loss` only says which entries of the batch forward does not read.
        name: name of the graph, the class's when left out.
        micro_batch: rows of a micro-batch, for a trace of fixed size.
        autocast: "bfloat16" or "float16": forward and loss run under torch.autocast.
        assume: "model.py:31" -> whether the condition in that line holds, where a tensor's value
            decides; plain runs say so when left out.
        leaves: modules that are kept whole, by path or class name; so are those marked by `leaf`.

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
        fused = nullcontext() if training else without_fast_path()
        with torch.device("meta") if on_meta else nullcontext(), without_gc(), fused:
            step = Step(module, loss, batch, how, training)
            plain = Plain(step, module, autocast)
            blank = any(is_blank(t) for t in (*module.parameters(), *module.buffers()))
            found = Leaves(find_leaves(module, leaves))
            ladder = Ladder(step, batch, plain, not blank, Oracle(dict(assume or {})), found)
            return _Job(step, batch, labels, blank, ladder).run(micro_batch)
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
    ladder: Ladder
    warnings: list[str] = field(default_factory=list)

    def run(self, micro_batch: int | None) -> Captured:
        """Try a free batch size, then a fixed one."""
        refused: CaptureError | None = None
        try:
            found = self.follow(micro_batch)
        except CaptureError as error:
            if not self.ladder.may_be_strict(error):
                raise
            refused = error
        if refused is not None:  # out here, or it would be the context of what comes now
            found = self.strictly(micro_batch, refused)
        said = (*self.warnings, *self.ladder.remarks(found.graph))
        graph = with_saves(found.graph)
        return replace(found, graph=graph, warnings=tuple(dict.fromkeys(said)))

    def strictly(self, micro_batch: int | None, error: CaptureError) -> Captured:
        """Try torch's strict tracer; where it fails, too, the first error is the one to tell."""
        self.ladder.strict = True
        self.warnings.clear()
        try:
            return self.follow(micro_batch)
        except (BigBrainError, AssertionError):
            raise error from None

    def follow(self, micro_batch: int | None) -> Captured:
        """Trace with a free batch size, else with a fixed one."""
        found, problem = self.free()
        if found is None:
            rows = micro_batch or self.batch.rows
            self.warnings.append(
                f"the trace holds for micro-batches of {rows} rows only: {problem}"
            )
            found = self.fixed(rows)
        return found

    def free(self) -> tuple[Captured | None, str]:
        """Trace with a free batch size and compare at two sizes; say why when it cannot be."""
        try:
            found = self.ladder.climb(lambda: self.attempt(max(2, self.batch.rows), free=True))
        except Exception as error:  # whatever torch.export raises
            if is_final(error):
                raise
            return None, str(explain(error).what)
        rows = (1, 3) if self.batch.rows != 3 else (1, 4)
        self.check_rows(found)
        problem = self.problem(found, rows)
        return (found, "") if problem is None else (None, problem)

    def fixed(self, rows: int) -> Captured:
        """Trace with a fixed batch size and compare; explain what goes wrong."""
        try:
            found = self.ladder.climb(lambda: self.attempt(rows, free=False))
        except Exception as error:
            raise self.own_fault(rows) or self.refusal(error) from error
        wrong = self.problem(found, (rows,))
        if wrong is not None:
            raise CaptureError(
                f"BX0201: the captured graph does not compute what the model computes: {wrong}",
                at=_where(found.graph, wrong),
                help=_advice(wrong),
            )
        return found

    def attempt(self, rows: int, free: bool) -> Captured:
        """Trace once."""
        tensors = list(self.batch.sized(rows).values())
        batched = [entry.batched and free for entry in self.batch.entries]
        noting, helping = noting_arguments(self.step.model), self.ladder.helping(rows, free)
        kept = random_state_kept()
        with kept, rolls() as rolled, recording() as recorder, helping as keeper, noting as given:
            self.ladder.recorder = recorder
            program = export_step(
                self.step, tensors, batched, self.labels.autocast, strict=self.ladder.strict
            )
        said = self.ladder.judge_dice(tensors, self._quiet_run) if rolled else None
        self.warnings += [said] if said else []
        labels = replace(
            self.labels,
            static_rows=None if free else rows,
            has_loss=self.step.seen.has_loss,
            output_names=self.step.seen.output_names,
        )
        calls, model = recorder.calls, self.step.model
        graph, store = translate(program, model, self.batch, calls, labels, keeper.calls)
        graph = with_hints(graph, given, program.graph.nodes)
        graph = without_settled(graph)
        bet = wrong_bet(graph, store.tensors)
        if bet is not None:
            raise undecided(bet.source, bet.code, by_dice=True)
        functions: dict[str, object] = {c.target: c.function for c in recorder.calls.values()}
        functions |= self.ladder.kept_functions()
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
        gradients = affordable(found.graph, rows, share=BACKWARD)
        for seed, count in enumerate(rows):
            try:
                wrong = trial.first_difference(self.batch.sized(count), seed, gradients)
            except AssumptionError as error:
                wrong = self.broken(trial, str(error), count)
            if wrong is not None:
                return f"at {count} rows, {wrong}"
        return None

    def check_rows(self, found: Captured) -> None:
        """Refuse a model whose last rows do not stand alone: a micro-batch holds such rows.

        Offsets into another entry of the batch are an example: those of the second half begin in
        the middle.

        Raises:
            InputError: it takes the first half of the example batch, and not the second.
        """
        half = self.batch.rows // 2
        if self.on_meta or not half or not affordable(found.graph, (half,)):
            return
        try:
            self.ladder.plain.run(list(self.batch.last(half).values()), 0)
        except RuntimeError as error:
            if self.own_fault(half) is None:
                raise last_rows(error) from error

    def broken(self, trial: Trial, what: str, rows: int) -> str | None:
        """Compare on the example batch as it is, where fewer rows contradict an assumption."""
        if rows == self.batch.rows:
            return what
        try:
            return trial.first_difference(self.batch.sized(self.batch.rows), rows, True)
        except AssumptionError as error:
            return str(error)

    def _quiet_run(self, tensors: Sequence[Tensor]) -> None:
        cast_as_asked = ambient(self.labels.autocast, tensors)
        # without numbers nothing is computed: shapes are enough to walk the same lines
        shapes = FakeTensorMode(allow_non_fake_inputs=True) if self.on_meta else nullcontext()
        with quiet(), torch.no_grad(), torch.random.fork_rng(devices=[]), cast_as_asked, shapes:
            self.step(*tensors)

    def refusal(self, error: Exception) -> BigBrainError:
        """Explain an error; where forward computes the loss, say how to take that out."""
        model = type(self.step.model).__name__
        found = explain(error, model)
        names = list(dict.fromkeys(str(e.key[0]) for e in self.batch.entries if e.key))
        its_own = self.step.own_loss is None and may_be_loss(error, model)
        return with_loss_remedy(found, names) if its_own else found

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


def _advice(wrong: str) -> str:
    """Say what most often makes a trace differ in this way."""
    if "no gradient" in wrong:
        return (
            "a reentrant checkpoint stops the gradient where none of its inputs needs one: "
            "call checkpoint(..., use_reentrant=False)"
        )
    return "keep Python's random numbers, and state that is no buffer, out of forward"


def _where(graph: Graph, wrong: str) -> str:
    """Return the user's line of the op that reads the tensor a difference is about."""
    words = set(wrong.split())
    readers = (op for op in graph.ops if words.intersection((op.name, *op.params)))
    return next((op.source for op in readers if op.source), "")
