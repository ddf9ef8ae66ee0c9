"""The child process of `profile`: load the model file, capture, run rounds, fill the database.

Run as `python -m bigbrain_fx.measure.ops.child '{"location": ...}'`. Standard output carries one
JSON object a line (`session` reads them); what the user's code prints goes to stderr. It ends with
its parent.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import Replies

if TYPE_CHECKING:
    import torch

    from bigbrain_fx.costs import Machine, ProfileStore
    from bigbrain_fx.frontend import Captured
    from bigbrain_fx.measure.ops.parts import Part
    from bigbrain_fx.measure.ops.stopwatch import Stopwatch
    from bigbrain_fx.measure.ops.subject import Subject

_WRITE_EVERY = 5  # rounds: a run that is killed loses no more
_OPTIMIZER_STEPS = 10


def main(words: str, begin: Callable[[], None] = lambda: None) -> None:
    """Profile; report progress and the end, or what went wrong.

    Args:
        words: what is wanted, as JSON.
        begin: called once the model is captured, before anything is timed.
    """
    replies = Replies()

    def work() -> Mapping[str, object]:
        _Profiler(json.loads(words), replies).run(begin)
        return {}

    replies.reply(work)


@contextmanager
def fitting(model: str, device: torch.device) -> Iterator[None]:
    """Say in a user's words that a GPU's memory is used up."""
    import torch

    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise InputError(
            f"a step of {model} does not fit into the memory of {device}",
            code="BX1513",
            at="--device",
            notes=(str(error).partition("\n")[0],),
            help="give fewer --rows, or end what else uses that GPU",
        ) from error


class _Profiler:
    """One model, one machine, one database: one session."""

    def __init__(self, wanted: Mapping[str, object], replies: Replies) -> None:
        import torch

        from bigbrain_fx.costs import ProfileStore
        from bigbrain_fx.runtime import keep_freed_memory

        keep_freed_memory()  # as a bundle's process does
        self.wanted, self.replies = wanted, replies
        self.threads = cast("int", wanted["threads"])
        self.rounds = cast("int", wanted["rounds"])
        torch.set_num_threads(self.threads)
        self.store: ProfileStore = ProfileStore(str(wanted["store"]))
        self.file_stem = self.model = self.session = ""
        self.make_optimizer: Callable[..., torch.optim.Optimizer] | None = None

    @cached_property
    def device(self) -> torch.device:
        """The measured device; a CUDA device becomes the one that this process means by "cuda"."""
        import torch

        from bigbrain_fx.measure.ops.machine import chosen_device

        device = chosen_device(str(self.wanted["device"]))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    @cached_property
    def machine(self) -> Machine:
        """That device, with the rates of this session."""
        from bigbrain_fx.measure.ops.machine import this_machine

        return this_machine(self.threads, self.device)

    @cached_property
    def watch(self) -> Stopwatch:
        """The measuring process."""
        from bigbrain_fx.measure.ops.stopwatch import stopwatch

        return stopwatch(self.device, self.threads)

    def run(self, begin: Callable[[], None]) -> None:
        """Capture, and measure each number of rows that lacks something; then the optimizer."""
        _ = self.device  # refuse one that is not there before the model is loaded
        captured = self._capture()
        begin()
        self.model = self.session = f"{self.file_stem}.{captured.graph.name}"
        if not self.wanted["training"]:
            self.session += " (inference)"  # it must not replace one that knows the optimizer
        self.replies.say(machine=self.machine.key, name=captured.graph.name)
        rows = self._rows(captured)
        measured = self._parts(captured)
        with fitting(captured.graph.name, self.device):
            fresh = [self._measure(captured, part, n) for part in measured for n in rows]
            if any(fresh) or not self._knows_optimizer():
                self._optimizer(self._subject(captured, measured[0], rows[0]))

    def _knows_optimizer(self) -> bool:
        """Whether the last session of this model came to its end."""
        sessions = self.store.sessions(self.machine.key)
        return any(s.model == self.session and s.machine.knows_optimizer for s in sessions)

    def _capture(self) -> Captured:
        from bigbrain_fx.frontend import capture, load_model_file

        file = load_model_file(str(self.wanted["location"]), seed=cast("int", self.wanted["seed"]))
        self.file_stem, self.make_optimizer = file.path.stem, file.optimizer
        sys.path.insert(0, str(file.path.parent))  # forward may import, too
        return capture(
            file.model,
            file.example_batch,
            file.loss,
            training=bool(self.wanted["training"]),
            name=type(file.model).__name__,
            autocast=file.autocast,
            batch_dims=file.batch_dims,
            assume=cast("Mapping[str, bool]", self.wanted["assume"]),
            leaves=(*file.leaves, *cast("Sequence[str]", self.wanted["leaves"])),
        )

    def _rows(self, captured: Captured) -> Sequence[int]:
        graph, asked = captured.graph, cast("Sequence[int]", self.wanted["rows"])
        fixed = graph.static_batch
        if fixed is not None and asked and set(asked) != {fixed}:
            raise InputError(
                f"the trace of {graph.name} holds for {fixed} rows only",
                code="BX1514",
                at="--rows",
                help=f"--rows {fixed}",
            )
        return [fixed] if fixed is not None else asked or [graph.batch]

    def _parts(self, captured: Captured) -> Sequence[Part]:
        """Return what is measured, the whole model first."""
        from bigbrain_fx.measure.ops.parts import parts

        shares = cast("Sequence[int]", self.wanted["tensor_shares"])
        return tuple(parts(captured, shares, cast("Sequence[str]", self.wanted["tensor_axes"])))

    def _subject(self, captured: Captured, part: Part, rows: int) -> Subject:
        from bigbrain_fx.measure.ops.subject import Subject

        inputs = captured.inputs(rows)
        return Subject(part.at(rows), part.tensors, inputs, captured.functions, self.device)

    def _measure(self, captured: Captured, part: Part, rows: int) -> bool:
        """Measure a number of rows; return whether anything was lacking."""
        from bigbrain_fx.costs import signatures
        from bigbrain_fx.measure.ops.rounds import Rounds

        graph = part.at(rows)
        keys = {signature.key for _, signature in signatures(graph)}
        found = (self.store.get(self.machine.key, key) for key in keys)
        lacking = sum(profile is None or profile.samples < self.rounds for profile in found)
        facts = {"rows": rows, "part": part.name, "ops": len(graph.ops), "signatures": len(keys)}
        facts["lacking"] = lacking
        self.store.credit(self.model, *sorted(keys))
        if not lacking:
            self.replies.say(measured=facts)
            return False
        rounds = Rounds(self._subject(captured, part, rows), self.watch)
        rounds.warm_up()
        for number in range(1, self.rounds + 1):
            rounds.again()
            if number % _WRITE_EVERY == 1 or number == self.rounds:
                self.store.put(self.machine, *rounds.profiles(), model=self.session)
            self.replies.say(round=number, of=self.rounds, rows=rows)
        self.replies.say(measured={**facts, "ops_s": rounds.ops_s, "step_s": rounds.step_s})
        rounds.subject.forget()  # a GPU's memory must be free for what is measured next
        return True

    def _optimizer(self, subject: Subject) -> None:
        """Measure the optimizer last: it changes the weights."""
        from bigbrain_fx.costs import fit_optimizer
        from bigbrain_fx.measure.ops.optimizer import optimizer_times

        if not subject.named:
            return
        make = self.make_optimizer
        found = optimizer_times(subject.named, make, self.watch, _OPTIMIZER_STEPS)
        a_tensor_s, a_byte_s = fit_optimizer(found.steps)
        machine = replace(
            self.machine, optimizer_s_per_tensor=a_tensor_s, optimizer_s_per_byte=a_byte_s
        )
        self.store.put(machine, model=self.session, optimizer=found.name, steps=found.steps)
        off = max(step.off(a_tensor_s, a_byte_s) for step in found.steps)
        said = f"{1e6 * a_tensor_s:.1f} us a tensor and {1e9 * a_byte_s:.3f} ns a byte"
        fits = f"it fits {len(found.steps)} sets within {100 * off:.0f} %"
        self.replies.say(optimizer=f"{found.name}: {said}; {fits}")


if __name__ == "__main__":
    main(sys.argv.pop())
    sys.stderr.flush()
    os._exit(0)  # all is written; taking torch down in order takes a second
