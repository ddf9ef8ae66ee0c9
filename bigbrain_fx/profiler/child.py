"""The child process of `profile`: load the model file, capture, run rounds, fill the database.

Run as `python -m bigbrain_fx.profiler.child '{"location": ...}'`. Standard output carries one JSON
object a line (`session` reads them); what the user's code prints goes to stderr. It ends with its
parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, cast

from bigbrain_fx.errors import BigBrainError, InputError

if TYPE_CHECKING:
    from bigbrain_fx.capture import Captured
    from bigbrain_fx.profiler.rounds import Rounds
    from bigbrain_fx.profiles import Machine, ProfileStore

_PR_SET_PDEATHSIG = 1
_WRITE_EVERY = 5  # rounds: a run that is killed loses no more
_OPTIMIZER_STEPS = 10


def main() -> None:
    """Profile; report progress and the end, or what went wrong."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        _Profiler(json.loads(sys.argv[1]), replies).run()
    except BigBrainError as error:
        fields = {"what": error.what, "at": error.at, "notes": error.notes, "help": error.help}
        _say(replies, error={"kind": type(error).__name__, **fields})
    except Exception:
        _say(replies, internal=traceback.format_exc())


def _say(replies: IO[str], **message: object) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


class _Profiler:
    """One model, one machine, one database."""

    def __init__(self, wanted: Mapping[str, object], replies: IO[str]) -> None:
        import torch

        from bigbrain_fx.profiles import ProfileStore
        from bigbrain_fx.runtime.malloc import keep_freed_memory

        keep_freed_memory()  # as a bundle's process does
        self.wanted, self.replies = wanted, replies
        self.threads = cast("int", wanted["threads"])
        self.rounds = cast("int", wanted["rounds"])
        torch.set_num_threads(self.threads)
        self.store: ProfileStore = ProfileStore(str(wanted["store"]))
        self.file_stem = ""

    def run(self) -> None:
        """Capture, and measure each number of rows that lacks something."""
        from bigbrain_fx.profiler.machine import this_machine

        captured = self._capture()
        machine = this_machine(self.threads)
        known = {entry.key: entry for entry in self.store.machines()}
        machine = known.get(machine.key, machine)
        _say(self.replies, machine=machine.key, name=captured.graph.name)
        last = None
        for rows in self._rows(captured):
            last = self._measure(captured, machine, rows) or last
        if last is not None and last.subject.trained:
            self._optimizer(machine, last)

    def _capture(self) -> Captured:
        from bigbrain_fx.capture import capture, load_model_file

        file = load_model_file(str(self.wanted["location"]), seed=cast("int", self.wanted["seed"]))
        self.file_stem = file.path.stem
        sys.path.insert(0, str(file.path.parent))  # forward may import, too
        return capture(
            file.model,
            file.example_batch,
            file.loss,
            training=bool(self.wanted["training"]),
            name=type(file.model).__name__,
            autocast=file.autocast,
            assume=cast("Mapping[str, bool]", self.wanted["assume"]),
            leaves=(*file.leaves, *cast("Sequence[str]", self.wanted["leaves"])),
        )

    def _rows(self, captured: Captured) -> Sequence[int]:
        graph, asked = captured.graph, cast("Sequence[int]", self.wanted["rows"])
        fixed = graph.static_batch
        if fixed is not None and asked and set(asked) != {fixed}:
            raise InputError(
                f"the trace of {graph.name} holds for {fixed} rows only",
                at="--rows",
                help=f"--rows {fixed}",
            )
        return [fixed] if fixed is not None else asked or [graph.batch]

    def _measure(self, captured: Captured, machine: Machine, rows: int) -> Rounds | None:
        from bigbrain_fx.profiler.context import clock
        from bigbrain_fx.profiler.rounds import Rounds
        from bigbrain_fx.profiler.subject import Subject
        from bigbrain_fx.profiles import signatures

        graph = captured.graph.at(rows)
        keys = {signature.key for _, signature in signatures(graph)}
        found = (self.store.get(machine.key, key) for key in keys)
        lacking = sum(profile is None or profile.samples < self.rounds for profile in found)
        facts = {"rows": rows, "ops": len(graph.ops), "signatures": len(keys), "lacking": lacking}
        self.store.credit(f"{self.file_stem}.{graph.name}", *sorted(keys))
        if not lacking:
            _say(self.replies, measured=facts)
            return None
        subject = Subject(graph, captured.tensors, captured.inputs(rows), captured.functions)
        rounds = Rounds(subject, clock(self.threads))
        rounds.warm_up()
        for number in range(1, self.rounds + 1):
            rounds.again()
            if number % _WRITE_EVERY == 1 or number == self.rounds:
                self.store.put(machine, *rounds.profiles())
            _say(self.replies, round=number, of=self.rounds, rows=rows)
        _say(self.replies, measured={**facts, "ops_s": rounds.ops_s, "step_s": rounds.step_s})
        return rounds

    def _optimizer(self, machine: Machine, rounds: Rounds) -> None:
        """Measure the optimizer last: it changes the weights."""
        nbytes = sum(leaf.nbytes for leaf in rounds.subject.trained)
        per_byte_s = rounds.optimizer_s(_OPTIMIZER_STEPS) / nbytes
        self.store.put(replace(machine, optimizer_s_per_byte=per_byte_s))


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # all is written; taking torch down in order takes a second
