"""The child process of a capture session: load the model file, capture, then answer requests.

Run as `python -m bigbrain_fx.frontend.child '{"location": ...}'`. Standard output carries one JSON
object a line; prints of the user's code go to stderr. The process ends with its standard input, or
with its parent.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

from bigbrain_fx.errors import from_fields
from bigbrain_fx.frontend.capture_service import CaptureService
from bigbrain_fx.frontend.modelfile import module_name
from bigbrain_fx.frontend.prints import printed_once
from bigbrain_fx.frontend.service import Replies

if TYPE_CHECKING:
    from bigbrain_fx.frontend.micro_batches.effect import MicroBatchEffect
    from bigbrain_fx.frontend.modelfile import Example
    from bigbrain_fx.frontend.opaque_step.user_step import Call
    from bigbrain_fx.frontend.tracing.optimizers.memory import OptimizerFacts

_OBJECTS_A_SWEEP = 200_000
"""Objects made between two sweeps for garbage: torch's own modules are a million that all stay."""


Requests = Mapping[str, Callable[[CaptureService, Mapping[str, Any]], Mapping[str, object]]]
"""What else a child answers: "do" of a request -> its answer."""


def serve_captures(begin: Callable[[Mapping[str, Any]], Requests] = lambda _: {}) -> NoReturn:
    """Capture, report, and serve requests until standard input ends; so does this process then.

    Args:
        begin: called with the request once torch is loaded, before the model file is run.
    """
    gc.set_threshold(_OBJECTS_A_SWEEP, 20, 100)
    replies, prints = Replies(), printed_once()
    wanted = json.loads(sys.argv.pop())  # a model file may parse words of its own, and has none
    service: list[CaptureService] = []
    more: dict[str, Any] = {}

    def start() -> Mapping[str, object]:
        more.update(begin(wanted))
        service.append(service_of(wanted))
        return service[0].report()

    if replies.reply(start, "capture"):
        for line in replies.requests:
            request = json.loads(line)
            own = more.get(request["do"])
            answer = partial(own or CaptureService.serve, service[0], request)
            if own is not None:
                answer = partial(service[0].known.answer, request, answer)
            replies.reply(answer, str(request["do"]))
    if prints is not None:
        prints.finish(str(wanted["location"]))
    sys.stdout.flush()  # what the user's code printed
    sys.stderr.flush()
    os._exit(0)  # all is written; taking torch and the model down in order takes a second


def service_of(wanted: Mapping[str, object]) -> CaptureService:
    """Capture the requested model: as a trace, or as one op where a trace was refused."""
    return (OpaqueService if "refusal" in wanted else CaptureService)(wanted)


class OpaqueService(CaptureService):
    """The user's step as one op, after a refused trace; its runs change no state here."""

    example: ClassVar[Example] = "any"

    def _cut(self, wanted: Mapping[str, object]) -> None:
        """Return the batch uncut: the user's step takes it so."""

    def _capture(self, wanted: Mapping[str, object], blank: bool) -> None:
        from bigbrain_fx.frontend.opaque_step.capture import capture_step

        refusal = from_fields(cast("Mapping[str, Any]", wanted["refusal"]))
        runs = not (self.meta or blank)
        self.captured = capture_step(self.file, self.seed, refusal, runs=runs)

    def optimizer_facts(self) -> OptimizerFacts:
        """Measure in a fork: an optimizer may step other parameters than it is given."""
        from bigbrain_fx.frontend.opaque_step.trial import done_apart
        from bigbrain_fx.frontend.tracing.optimizers.memory import OptimizerFacts

        return done_apart(super().optimizer_facts, OptimizerFacts(measured=False))

    def micro_batch_effect(self, count: int) -> MicroBatchEffect:
        """Compare in a fork: the weights that are written later must stay model()'s."""
        from bigbrain_fx.frontend.first_batches import uncut
        from bigbrain_fx.frontend.micro_batches.effect import MicroBatchEffect
        from bigbrain_fx.frontend.opaque_step.trial import done_apart

        if self.file.micro is not None:
            return MicroBatchEffect(count, cause="micro() cuts the batches of a step that is split")
        nothing = "the comparison took too long, or has ended"

        def compare() -> MicroBatchEffect:
            effect = super(OpaqueService, self).micro_batch_effect(count)
            return uncut(effect, self.file, self.captured.batch, self.seed)

        fault = self._parts_fault(count)  # first: the comparison calls the model, too
        if fault:
            return MicroBatchEffect(count, cause=fault)
        return done_apart(compare, MicroBatchEffect(count, not_compared=nothing))

    def _parts_fault(self, count: int) -> str:
        from bigbrain_fx.frontend.micro_batches.gradients import micro_batches
        from bigbrain_fx.frontend.opaque_step.parts import PartsTrial
        from bigbrain_fx.frontend.opaque_step.user_step import UserStep
        from bigbrain_fx.frontend.translation.batch import fill

        file, batch = self.file, self.captured.batch
        call = cast("Call", self.captured.graph.ops[0].args[0])
        parts = [fill(batch.template, each) for each in micro_batches(batch, batch.rows, count)]
        step = UserStep(file.model, file.loss, call, file.autocast)
        module = sys.modules[module_name(file)]
        return PartsTrial(step, parts, file, module, self.seed).fault()


if __name__ == "__main__":
    serve_captures()
