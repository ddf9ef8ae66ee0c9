"""What a child process with an opaque step answers, and which service a capture asks for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from bigbrain_fx.errors import from_fields
from bigbrain_fx.frontend.capture_service import CaptureService
from bigbrain_fx.frontend.file_checks import module_name

if TYPE_CHECKING:
    from bigbrain_fx.frontend.micro_batches.effect import MicroBatchEffect
    from bigbrain_fx.frontend.modelfile import Example
    from bigbrain_fx.frontend.opaque_step.user_step import Call
    from bigbrain_fx.frontend.tracing.optimizers.memory import OptimizerFacts


def service_of(wanted: Mapping[str, object]) -> CaptureService:
    """Capture what is wanted: a trace, or the step as one op where a trace was refused."""
    return (OpaqueService if "refusal" in wanted else CaptureService)(wanted)


class OpaqueService(CaptureService):
    """The user's step as one op, since a trace was refused; nothing of it leaves a trace here."""

    example: ClassVar[Example] = "any"

    def _cut(self, wanted: Mapping[str, object]) -> None:
        """Leave the batch whole: the user's step takes it so."""

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
        """Compare in a fork: the weights that are written later are those of model()."""
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
