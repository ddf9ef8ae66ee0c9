"""One capture in the making: exported with a free batch size or a fixed one, and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bigbrain_fx.core import longest
from bigbrain_fx.errors import BigBrainError, CaptureError, InputError
from bigbrain_fx.frontend.refusal import OF_ONE_LENGTH, TOO_LARGE
from bigbrain_fx.frontend.tracing.batches.row_independence import asked_for_inference
from bigbrain_fx.frontend.tracing.captured import Captured
from bigbrain_fx.frontend.tracing.check import BACKWARD, CheckRun, affordable, module_apart
from bigbrain_fx.frontend.tracing.executor.activation_memory import with_saves
from bigbrain_fx.frontend.tracing.export import ambient, export_step, lengths_in, quiet
from bigbrain_fx.frontend.tracing.hooks import (
    check_hooks,
    check_saved_tensors_hooks,
    refusing_autograd,
    refusing_hooks,
)
from bigbrain_fx.frontend.tracing.ladder import Ladder
from bigbrain_fx.frontend.tracing.lines import size_guards
from bigbrain_fx.frontend.tracing.lines.advice import (
    BY_DATA,
    COMPILED,
    OF_CRITERION,
    advice,
    first_remedy,
    where_differs,
)
from bigbrain_fx.frontend.tracing.lines.patches import data_seen
from bigbrain_fx.frontend.tracing.lines.random_branches import without_settled, wrong_bet
from bigbrain_fx.frontend.tracing.objective import (
    is_one_value,
    on_written,
    require_constants_unwritten,
    require_dense,
    require_numbers,
)
from bigbrain_fx.frontend.tracing.plain import state_kept
from bigbrain_fx.frontend.tracing.state.python_rng import random_state_kept, rolls
from bigbrain_fx.frontend.tracing.step import Step, is_compiled
from bigbrain_fx.frontend.translation.arguments import noting_arguments, with_hints
from bigbrain_fx.frontend.translation.batch import Batch, Entry
from bigbrain_fx.frontend.translation.opaque import recording
from bigbrain_fx.frontend.translation.oracle import WrongAnswerError
from bigbrain_fx.frontend.translation.refusals import (
    as_whole,
    explain,
    is_final,
    last_rows,
    may_be_loss,
    modules_of,
    said_axis,
    undecided,
    with_loss_remedy,
)
from bigbrain_fx.frontend.translation.sources import where
from bigbrain_fx.frontend.translation.trace_refusals import (
    BY_DATA as BY_DATA_READ,
)
from bigbrain_fx.frontend.translation.translate import Labels, translate


@dataclass
class CaptureJob:
    """One capture in the making."""

    step: Step
    batch: Batch
    labels: Labels
    on_meta: bool
    ladder: Ladder
    warnings: list[str] = field(default_factory=list)
    by_data: list[str] = field(default_factory=list)  # lines that go by `.data`
    asked: tuple[size_guards.Asked, ...] = ()  # of the number of rows
    asked_of_lengths: tuple[size_guards.AskedOfLengths, ...] = ()

    def run(self, micro_batch: int | None) -> Captured:
        """Try a free batch size, then a fixed one."""
        self.judge_hooks()
        found = self.follow(micro_batch)
        self.judge_hooks()  # those that forward has set meanwhile
        if affordable(found.graph, (self.batch.rows,)):
            self.ladder.judge_questions()
        said = (*self.warnings, *self.ladder.remarks(found.graph))
        said += (COMPILED,) if is_compiled(self.step.model) else ()
        if found.graph.loss is None and not (self.labels.training or self.on_meta):
            graph, more = asked_for_inference(self.ladder.plain, self.batch, found.graph)
            found, said = replace(found, graph=graph), said + more
        written = (*self.step.seen.written,)
        said += on_written(written)
        graph, said = with_saves(found.graph), (*dict.fromkeys(said),)
        return replace(found, graph=graph, warnings=said, written=written)

    def judge_hooks(self) -> None:
        """Refuse hooks that a bundle would leave out."""
        check_saved_tensors_hooks()
        if self.labels.training:
            check_hooks(self.step.model, self.ladder.leaves.modules.values())

    def follow(self, micro_batch: int | None) -> Captured:
        """Trace with a free batch size, else with a fixed one."""
        if self.labels.is_fixed:
            return self.fixed(self.batch.rows)
        found, problem = self.free()
        if found is None:
            rows = micro_batch or self.batch.rows
            self.warnings.append(
                f"the trace holds for micro-batches of {rows} rows only: {problem}"
            )
            found = self.fixed(rows)
        return found

    def free(self) -> tuple[Captured | None, str]:
        """Trace with a free batch size, and with free lengths where batches have unequal ones."""
        found, problem = self.free_rows()
        if found is not None or not self.batch.lengths:
            return found, problem
        self.batch = self.batch.of_one_length()
        found, again = self.free_rows()
        if again != problem:
            self.warnings.append(f"{OF_ONE_LENGTH}: {problem}")
        return found, again

    def free_rows(self) -> tuple[Captured | None, str]:
        """Trace with a free batch size and compare at two sizes; say why when it cannot be."""
        try:
            found = self.ladder.climb(lambda: self.attempt(max(2, self.batch.rows), free=True))
        except Exception as error:  # whatever torch.export raises
            if is_final(error):
                raise
            return None, str(explain(error).what)
        rows = (1, 3) if self.batch.rows != 3 else (1, 4)
        asks = size_guards.goes_by_rows(self.asked, self.batch.rows, self.own_fault)
        problem = asks or self.unlike_rows(found) or self.problem(found, rows)
        problem = problem or self.unlike_lengths(found)
        return (found, "") if problem is None else (None, problem)

    def fixed(self, rows: int) -> Captured:
        """Trace with a fixed batch size and compare; explain a failure."""
        try:
            found = self.ladder.climb(lambda: self.attempt(rows, free=False))
        except Exception as error:
            raise self.own_fault(rows) or self.refusal(error) from error
        wrong = self.problem(found, (rows,))
        if wrong is not None:
            raise self.other_numbers(found, wrong)
        fault = self.own_fault(rows) if rows != self.batch.rows else None
        if fault is not None:
            raise fault  # there was nothing to compare with
        return found

    def other_numbers(self, found: Captured, wrong: str) -> BigBrainError:
        """Refuse a graph with other results than the module's; look for the cause."""
        error: BigBrainError = CaptureError(
            f"the captured graph does not compute what the model computes: {wrong}",
            code="BX0201",
            at=where_differs(found.graph, wrong),
            help=advice(wrong, found.graph),
        )
        if self.by_data and error.family == "BX0201":
            error.at, error.help = self.by_data[0], BY_DATA
        if isinstance(error, CaptureError) and error.family == "BX0201":
            error.inside = module_apart(self.step, found, self.batch)
        return error

    def attempt(self, rows: int, free: bool) -> Captured:
        """Trace once."""
        tensors = list(self.batch.sized(rows).values())
        batched = [entry.batched and free for entry in self.batch.entries]
        noting, helping = noting_arguments(self.step.model), self.ladder.helping(rows, free)
        hooks = refusing_hooks() if self.labels.training else nullcontext()
        with (
            random_state_kept(),
            data_seen() as self.by_data,
            rolls() as rolled,
            recording() as recorder,
            helping as keeper,
            noting as given,
            hooks,
            refusing_autograd(),
        ):
            self.ladder.recorder = recorder
            lengths = [entry.lengths if free else () for entry in self.batch.entries]
            program = export_step(
                self.step,
                tensors,
                batched,
                self.labels.autocast,
                lengths=lengths,
            )
        symbols = lengths_in(program, lengths)
        self.asked = size_guards.in_guards(program, symbols)
        self.asked_of_lengths = size_guards.of_lengths(program, symbols, rows)
        unseen = rolled or self.ladder.leaves  # opaque code was not run here
        said = self.ladder.judge_dice(tensors, self._quiet_run) if unseen else None
        self.warnings += [said] if said else []
        labels = replace(
            self.labels,
            static_rows=None if free else rows,
            has_loss=self.step.seen.has_loss,
            output_names=self.step.seen.output_names,
        )
        graph, store = translate(program, self.step.model, self.batch, keeper.calls, labels)
        require_numbers(graph, store.tensors)
        if self.labels.training:
            require_dense(graph)
            require_constants_unwritten(graph, store.tensors, self.step.model, self.step.own_loss)
        graph = with_hints(graph, given, program.graph.nodes)
        graph = without_settled(graph)
        bet = wrong_bet(graph, store.tensors)
        if bet is not None:
            raise undecided(bet.source, bet.code, by_dice=True)
        functions = {**recorder.functions, **self.ladder.kept_functions()}
        return Captured(graph, store.tensors, functions, (), self.batch)

    def problem(self, found: Captured, rows: Sequence[int]) -> str | None:
        """Compare graph and module at batch sizes; return the first difference."""
        gradients = not self.on_meta and affordable(found.graph, rows, share=BACKWARD)
        if self.by_data and not gradients:
            raise BY_DATA_READ.error(self.by_data[0])
        if self.on_meta:
            return None
        if not affordable(found.graph, rows):
            self.warnings.append(TOO_LARGE)
            return None
        trial = CheckRun(self.step, found.graph, found.tensors, found.functions)
        half = max(1, self.batch.rows // 2)
        more = (2, half, self.batch.rows) if len(rows) > 1 else (*rows, *rows)
        for seed, count in enumerate((*rows, *more)):
            if seed == len(rows) and not self.asks_more(trial, found, more):
                break
            try:
                wrong = trial.first_difference(self.batch.sized(count), seed, gradients)
            except WrongAnswerError as error:
                wrong = self.broken(trial, str(error), count)
            if wrong is not None:
                return f"at {count} rows, {wrong}"
        fault = None if trial.ran else self.own_fault(self.batch.rows)
        if fault is not None:
            raise fault
        return None

    def asks_more(self, trial: CheckRun, found: Captured, more: Sequence[int]) -> bool:
        """Return whether to compare at other numbers of rows, too.

        A norm refuses one row.
        """
        if not affordable(found.graph, more):
            return False
        return not trial.ran

    def unlike_lengths(self, found: Captured) -> str | None:
        """Say why the trace does not hold for shorter batches."""
        names = self.batch.lengths
        asks = size_guards.goes_by_length(self.asked_of_lengths, names)
        if asks is not None or self.on_meta or not names:
            return asks
        if not affordable(found.graph, (self.batch.rows,), share=BACKWARD):
            return None  # `problem` has said so
        trial = CheckRun(self.step, found.graph, found.tensors, found.functions)
        for seed, count in enumerate(_shorter(names)):
            shorter = self.batch.shorter({name: min(count, longest(name)) for name in names})
            wrong = trial.first_difference(shorter.sized(shorter.rows), seed, gradients=True)
            if wrong is not None:
                return f"in a batch of length {count}, {wrong}"
        return None

    def unlike_rows(self, found: Captured) -> str | None:
        """Return the reason why half of the example's rows cannot run alone, as a micro-batch does.

        Offsets into another entry of the batch are an example: the second half's begin in the
        middle.

        Raises:
            InputError: the first half can be run, and the second cannot.
        """
        half = self.batch.rows // 2
        if self.on_meta or not half or not affordable(found.graph, (half,)):
            return None
        last = self.batch.last(half)
        try:
            self.ladder.plain.run(list(last.values()), 0)
        except BigBrainError:
            raise
        except Exception as error:
            if is_one_value(error):
                return None  # a norm wants more rows than this probe has
            whole = self.whole_entry(last)
            if self.own_fault(half) is None:
                raise last_rows(error, self.batch, whole) from error
            first, axis = (str(error).splitlines() or [""])[0], said_axis(self.batch, whole)
            return f"{type(error).__name__} at {half} rows: {first[:200]}; {axis}"
        return None

    def whole_entry(self, tensors: Mapping[str, Tensor]) -> Entry | None:
        """Return the entry with which the model takes these rows when it is not split, if one is.

        Args:
            tensors: fewer rows of every entry, which the model fails on.
        """
        for entry in (entry for entry in self.batch.entries if entry.batched):
            with suppress(Exception):
                self.ladder.plain.run(list({**tensors, entry.name: entry.tensor}.values()), 0)
                return entry
        return None

    def broken(self, trial: CheckRun, what: str, rows: int) -> str | None:
        """Compare on the example batch as it is, where fewer rows contradict an assumption."""
        if rows == self.batch.rows:
            return what
        try:
            return trial.first_difference(self.batch.sized(self.batch.rows), rows, True)
        except WrongAnswerError as error:
            return str(error)

    def _quiet_run(self, tensors: Sequence[Tensor]) -> None:
        around = None if self.step.casts_itself else self.labels.autocast
        cast_as_asked = ambient(around, tensors)
        # without numbers nothing is computed: shapes are enough to walk the same lines
        shapes = FakeTensorMode(allow_non_fake_inputs=True) if self.on_meta else nullcontext()
        grad = torch.set_grad_enabled(self.labels.training)  # forward may ask for gradients
        kept = nullcontext() if self.on_meta else state_kept(self.step.model)
        with quiet(), grad, torch.random.fork_rng(devices=[]), cast_as_asked, shapes, kept:
            self.step(*tensors)

    def refusal(self, error: Exception) -> BigBrainError:
        """Explain an error; where forward computes the loss, say how to take that out."""
        model = type(self.step.model).__name__
        found = explain(error, model)
        if isinstance(found, CaptureError):
            found.inside = found.inside or modules_of(error)
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
            if rows != self.batch.rows and self.own_fault(self.batch.rows) is None:
                whole = self.whole_entry(self.batch.sized(rows))
                return InputError(
                    f"the model fails on {rows} of the {self.batch.rows} rows of its example "
                    f"batch: {type(error).__name__}: {first}",
                    code="BX2104",
                    at=where(error),
                    notes=(said_axis(self.batch, whole),),
                    help="fewer micro-batches have more rows each: --micro-batches"
                    if whole is None
                    else f"{as_whole(whole)} in the model file, if its rows are no rows of the "
                    "batch; or fewer micro-batches, which have more rows each",
                )
            in_loss = self.step.seen.part == "loss"
            own = self.step.own_loss  # nn.CrossEntropyLoss(), or F.cross_entropy
            is_criterion = isinstance(own, nn.Module) or _is_of_torch(own)
            return InputError(
                f"the {'loss' if in_loss else 'model'} fails on its example batch: "
                f"{type(error).__name__}: {first}",
                code="BX2105",
                at=where(error),
                notes=() if in_loss else tuple(filter(None, [self.step.whole_batch_note])),
                help=OF_CRITERION if in_loss and is_criterion else first_remedy(error),
            )
        return None


def _is_of_torch(loss: object) -> bool:
    return str(getattr(loss, "__module__", "")).partition(".")[0] == "torch"


def _shorter(names: Iterable[str]) -> list[int]:
    """Return lengths at which a trace of free lengths is compared: none is the longest."""
    most = max(map(longest, names))
    return sorted({2, 3, most // 2, most - 1} & {*range(2, most)})
