"""Answers of a child process with a captured model: its report, then one request at a time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from bigbrain_fx.errors import BigBrainError, InputError, about_code
from bigbrain_fx.frontend.capture_cache.known import is_known_text, known_of, note_text
from bigbrain_fx.frontend.refusal import OF_ONE_LENGTH
from bigbrain_fx.frontend.spelling import misspelt_names

if TYPE_CHECKING:
    from torch import Tensor

    from bigbrain_fx.core import LossCount
    from bigbrain_fx.frontend.micro_batches.effect import MicroBatchEffect
    from bigbrain_fx.frontend.modelfile import Example, ModelFile
    from bigbrain_fx.frontend.tracing.captured import Captured
    from bigbrain_fx.frontend.tracing.optimizers.memory import OptimizerFacts

_Result = TypeVar("_Result")


class CaptureService:
    """The captured model, and the requests that a parent can send about it."""

    example: ClassVar[Example] = "traced"

    def __init__(self, wanted: Mapping[str, object]) -> None:
        import torch  # noqa: F401  # counted apart: any program that trains pays for it

        likely = is_known_text(wanted)
        if not likely:
            _settle_what_torch_finds()
        started_s = time.perf_counter()
        from bigbrain_fx.frontend.modelfile import load_model_file
        from bigbrain_fx.frontend.quantised import quantise
        from bigbrain_fx.frontend.tracing.optimizers.as_data import for_devices

        location, seed = str(wanted["location"]), cast("int", wanted["seed"])
        self.meta, self.seed = bool(wanted["meta"]), seed
        blank = bool(wanted["blank"])
        self.cache = cast("int", wanted["cache"])
        self.fixed: tuple[object, ...] = ()
        self.loss_count: LossCount | None = None  # by which micro-batches weigh, once it is found
        self.file = load_model_file(
            location,
            seed=seed,
            meta=self.meta,
            blank=blank,
            cache=self.cache,
            example=self.example,
        )
        _require_room(self.file, wanted)
        self.misspelt = () if self.file.is_data else misspelt_names(self.file.path)
        sys.path.insert(0, str(self.file.path.parent))  # forward may import, too
        if wanted["training"]:
            optimizer = for_devices(self.file.optimizer, self.file.model)
            self.file = replace(self.file, optimizer=optimizer)
        self.quantised = quantise(self.file.model) if wanted.get("quantize") else None
        self.trains = bool(wanted["training"]) and not self.meta
        self._cut(wanted)
        self.known = known_of(self.file, wanted)
        if not self._recalled():
            if likely:
                _settle_what_torch_finds(str(self.file.path.parent))
            self._about_code(partial(self._capture, wanted, blank))
            self._keep(wanted)
        _write_graph(self.captured, Path(str(wanted["graph"])))
        self.capture_s = time.perf_counter() - started_s

    def _capture(self, wanted: Mapping[str, object], blank: bool) -> None:
        """Trace the model, and require that a bundle can train it as the file says.

        Raises:
            BigBrainError: no trace can hold it, or a bundle of several devices would differ.
        """
        from bigbrain_fx.frontend import file_checks as checks
        from bigbrain_fx.frontend.first_batches import keeping_smaller
        from bigbrain_fx.frontend.plain_entries import fixed_parts
        from bigbrain_fx.frontend.quantised import require_read_by_layers

        if self.trains and not blank:
            trace = partial(checks.captured, wanted=wanted)
            self.file, self.captured = checks.captured_with_numbers(self.file, self.seed, trace)
            checks.require_steady_file(self.file, self.seed)
            self.fixed = fixed_parts(self.file, self.captured)
            self.file = keeping_smaller(self.file, self.seed, self.captured)
        else:
            self.captured = checks.captured(self.file, wanted)
        if wanted["training"] and self.meta:
            checks.require_optimizer(self.file)
        self.captured = checks.on_lengths(self.file, self.captured)
        self.captured = checks.require_uneven(self.file, self.captured, bool(wanted["training"]))
        if self.quantised is not None:
            require_read_by_layers(self.captured.graph)

    def _recalled(self) -> bool:
        """Whether an earlier command captured this very model: then it is captured now."""
        from bigbrain_fx.frontend.capture_cache.record import captured_of

        record = self.known.capture()
        captured = record and captured_of(record, self.file)
        if not record or not captured:
            return False
        self.captured, self.fixed = captured, tuple(record["fixed"])
        self.file = replace(self.file, drop_last=record["drop_last"])
        return True

    def _keep(self, wanted: Mapping[str, object]) -> None:
        """Keep the capture for later commands."""
        from bigbrain_fx.frontend.capture_cache.record import record_of

        if not self.known.keeps:
            return
        record = record_of(self.captured, self.file)
        more = {"fixed": self.fixed, "drop_last": self.file.drop_last}
        self.known.keep_capture(record and {**record, **more})
        if record is not None:
            note_text(wanted)

    def _cut(self, wanted: Mapping[str, object]) -> None:
        """Let the example be one of the parts into which `micro` cuts batches; or the longest."""
        from bigbrain_fx.frontend.lengths import with_lengths
        from bigbrain_fx.frontend.user_cut import with_parts

        if wanted["training"]:
            self.file = with_parts(self.file, cast("int", wanted["parts"]))
            self.file = with_lengths(self.file, self.seed, draws=self.trains)

    def report(self) -> Mapping[str, object]:
        """Report the capture; the graph itself is in its file."""
        found = self.known.answer({"do": "report"}, self._reported)
        return {**found, "capture_s": self.capture_s}

    def _reported(self) -> Mapping[str, object]:
        from bigbrain_fx.frontend.contract import marks_of
        from bigbrain_fx.frontend.modelfile import eval_parts_note, module_name
        from bigbrain_fx.frontend.tracing.batches.uneven import pads
        from bigbrain_fx.runtime import has_generators

        file, parameters = self.file, {id(p): p for p in self.file.model.parameters()}
        optimizer, data = self.optimizer_facts(), getattr(file.optimizer, "data", None)
        facts = {
            "path": file.location if file.is_data else str(file.path),
            "name": file.name,
            "module": module_name(file),
            "has_loss": file.loss is not None,
            "has_batches": file.batches is not None,
            "has_optimizer": file.optimizer is not None,
            "has_lr_scale": file.lr_scale is not None,
            "has_scheduler": file.scheduler is not None,
            "has_loss_weight": file.loss_weight is not None,
            "has_micro": file.whole_batch is not None,
            "marks": marks_of(file.model),
            "optimizer": data and asdict(data),
            "has_generators": has_generators(file.batches),
            "clip_norm": file.clip_norm,
            "grad_scaler": file.grad_scaler,
            "autocast": file.autocast,
            "drop_last": file.drop_last,
            "cache": self.cache,
            "positions": _positions(file),
            "batch_dims": {e.name: e.dim for e in self.captured.batch.entries if e.dim},
            "offsets": {e.name: e.per_row for e in self.captured.batch.entries if e.per_row},
            "pad": pads(self.captured.batch, file.pad),
            "lengths": self.captured.graph.lengths,
            "buckets": (file.lengths or ()) if self.captured.graph.lengths else (),
            "fixed": self.fixed,
            "parameters": sum(p.numel() for p in parameters.values()),
            "functions": sorted(self.captured.functions),
            "device_lines": self.captured.device_lines,
            "optimizer_state": optimizer.state,
            "optimizer_temporaries": optimizer.temporaries,
            "optimizer_leftover": optimizer.leftover,
            "optimizer_states": optimizer.states,
            "optimizer_at_once": optimizer.at_once,
        }
        note = optimizer.note if self.captured.graph.training else None
        modes = eval_parts_note(file.model) if self.captured.graph.training else None
        warnings = (*self.misspelt, *self.captured.warnings, *filter(None, [note, modes]))
        if self.quantised is not None:
            facts |= {"quantize": "int8", "quantize_error": self.quantised.error}
            warnings = (*warnings, *filter(None, [self.quantised.note]))
        return {"facts": facts, "warnings": warnings}

    def optimizer_facts(self) -> OptimizerFacts:
        """Measure the memory of the file's optimizer."""
        from bigbrain_fx.frontend.tracing.optimizers.memory import optimizer_facts

        return optimizer_facts(self.file.model, self.file.optimizer)

    def serve(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Answer one request."""
        return self._about_code(partial(self._answer, request))

    def _about_code(self, work: Callable[[], _Result]) -> _Result:
        """Mark refusals as about the user's code; an exception of its `batches` comes first.

        A step whose data cannot be read is trained by no device, however it is run.
        """
        from bigbrain_fx.frontend.first_batches import require_batches

        try:
            with about_code():
                return work()
        except (Exception, SystemExit) as error:
            refusal = error
        if self.trains:  # here, so that its own error has no other as its context
            require_batches(self.file, self.seed)
        if isinstance(refusal, BigBrainError):
            refusal.notes = (*self.misspelt, *refusal.notes)
        raise refusal

    def _answer(self, request: Mapping[str, object]) -> Mapping[str, object]:
        answer = self.known.answer(request, partial(self._found, request))
        if request["do"] == "micro-batches":
            self._weigh(answer["effect"])
        return answer

    def _weigh(self, found: object) -> None:
        """Note by which count micro-batches weigh."""
        from pydantic import TypeAdapter

        from bigbrain_fx.frontend.micro_batches.effect import MicroBatchEffect

        effect = TypeAdapter(MicroBatchEffect).validate_python(found)
        self.loss_count = None if effect.differs else effect.loss_count

    def _found(self, request: Mapping[str, object]) -> Mapping[str, object]:
        if request["do"] == "weights":
            files = cast("Mapping[str, list[str]]", request["files"])
            self.write_weights(Path(str(request["folder"])), files)
        elif request["do"] == "batch":
            self.write_batch(Path(str(request["path"])))
        elif request["do"] == "convert":
            return {"tensors": self.convert(str(request["path"]), Path(str(request["folder"])))}
        elif request["do"] == "optimizer":
            held = cast("Mapping[str, list[str]]", request["held"])
            here = bool(request["here"])
            return {"note": self.try_optimizer(held, request["shards"], here=here)}
        elif request["do"] == "micro-batches":
            return {"effect": asdict(self.micro_batch_effect(cast("int", request["count"])))}
        elif request["do"] == "batches":
            self.read_batches(request["reading"])
        elif request["do"] == "rules":
            from bigbrain_fx.frontend.tracing.executor.shard_rule_trial import failed_rules

            return {"failed": failed_rules(Path(str(request["path"])))}
        else:
            expected = "weights, batch, convert, optimizer, micro-batches, batches or rules"
            raise InputError(f"expected {expected}, found {request['do']!r}", code="BX2028")
        return {"done": request["do"]}

    def write_weights(self, folder: Path, files: Mapping[str, list[str]]) -> None:
        """Write the named tensors to safetensors files."""
        from safetensors.torch import save_file

        from bigbrain_fx.frontend.tracing.blank import is_blank
        from bigbrain_fx.weights import as_umask_says, tensors_apart

        for file, names in files.items():
            tensors = self.captured.tensors
            if self.meta or any(is_blank(tensors[name]) for name in names if name in tensors):
                raise InputError(
                    "the model was captured without weights",
                    code="BX2029",
                    help="capture it with meta=False",
                )
            unknown = [name for name in names if name not in self.captured.tensors]
            if unknown:
                raise InputError(
                    f"the model has no tensors {', '.join(unknown)}", code="BX2030", at=file
                )
            found = {name: self.captured.tensors[name] for name in names}
            save_file(tensors_apart(found), folder / file)
        as_umask_says(*(folder / file for file in files))

    def convert(self, path: str, folder: Path) -> Mapping[str, tuple[str, str]]:
        """Return the file and key of each tensor of a checkpoint, by the model's names."""
        from bigbrain_fx.frontend.hf.weights import converted
        from bigbrain_fx.weights import read_checkpoint

        found = converted(self.file.model, read_checkpoint(path), folder)
        return {name: (str(stored.file), stored.key) for name, stored in found.items()}

    def try_optimizer(
        self, held: Mapping[str, list[str]], shards: object, *, here: bool
    ) -> str | None:
        """Require that the optimizer and its scheduler can be made once per device."""
        from pydantic import TypeAdapter

        from bigbrain_fx.core import Shard
        from bigbrain_fx.frontend.tracing.optimizers.per_device import (
            require_divided,
            require_made_per_device,
        )

        file = self.file
        if file.optimizer is not None and shards:
            found = TypeAdapter(tuple[Shard, ...]).validate_python(shards)
            require_divided(file.model, file.optimizer, found)
        made = file.optimizer, file.scheduler
        return require_made_per_device(file.model, *made, held, here=here)

    def micro_batch_effect(self, count: int) -> MicroBatchEffect:
        """Compare a step on the example batch with one in so many micro-batches."""
        from bigbrain_fx.frontend.first_batches import further_batches
        from bigbrain_fx.frontend.micro_batches.measure import Training, micro_batch_effect
        from bigbrain_fx.frontend.user_cut import effect_of_parts

        file = self.file
        if file.parts > 1:
            return effect_of_parts(file, further_batches(file, self.seed))
        draw = partial(further_batches, file, self.seed)
        training = Training(
            file.model, file.loss, file.autocast, file.loss_weight, draw, from_shapes=self.meta
        )
        return micro_batch_effect(training, self.captured, count)

    def read_batches(self, reading: object) -> None:
        """Require that the first batches fit the trace."""
        from pydantic import TypeAdapter

        from bigbrain_fx.frontend.first_batches import BatchReading, require_first_batches

        found = TypeAdapter(BatchReading).validate_python(reading)
        reasons = [said for said in self.captured.warnings if said.startswith(OF_ONE_LENGTH)]
        require_first_batches(self.file, self.seed, found, "; ".join(reasons))

    def write_batch(self, path: Path) -> None:
        """Write the example batch's tensors, and its structure as JSON beside them."""
        from safetensors.torch import save_file

        from bigbrain_fx.weights import as_umask_says, tensors_apart

        batch = self.captured.batch
        if not self.meta:
            tensors = {entry.name: entry.tensor for entry in batch.entries}
            save_file(tensors_apart({**tensors, **self._row_counts()}), path)
            as_umask_says(path)
        structure = json.dumps(_structure(batch.template), indent=1)
        path.with_name(path.name + ".json").write_text(structure, encoding="utf-8")

    def _row_counts(self) -> dict[str, Tensor]:
        """Return the counts by which a bundle without data of its own weighs the example's rows."""
        from bigbrain_fx.core import ROW_COUNTS
        from bigbrain_fx.frontend.micro_batches.loss_count import counts_by_row

        own = self.file.loss_weight or (self.loss_count.of if self.loss_count else None)
        if own is None or self.file.batches is not None:
            return {}
        return {ROW_COUNTS: counts_by_row(own, self.captured.batch)}


def _settle_what_torch_finds(without: str | None = None) -> None:
    """Let torch look for modules that it can do without where the user's folder is not seen.

    One there that is called like one of them would be taken for it; see `users_code`, too.

    Args:
        without: the folder, where it is on sys.path already.
    """
    kept = list(sys.path)
    sys.path[:] = [entry for entry in kept if entry != without]
    try:
        from torch.fx.experimental import validator  # noqa: F401  # it looks for z3
    finally:
        sys.path[:] = kept


def _require_room(file: ModelFile, wanted: Mapping[str, object]) -> None:
    """Refuse a model that all devices together cannot hold, before it is traced."""
    from bigbrain_fx.frontend.room import Room, require_room

    said = cast("Mapping[str, Any] | None", wanted.get("room"))
    if said is not None:
        room = Room(said["nbytes"], tuple(said["notes"]))
        require_room(file.model, room, trains=bool(wanted["training"]))


def _write_graph(captured: Captured, path: Path) -> None:
    from pydantic import TypeAdapter

    from bigbrain_fx.core import Graph

    path.write_bytes(TypeAdapter(Graph).dump_json(captured.graph))


def _positions(file: ModelFile) -> int:
    from bigbrain_fx.frontend.cached.module import Cached

    return file.model.row.longest if isinstance(file.model, Cached) else 0


def _structure(template: object) -> object:
    """Write a template as JSON: {"tensor": name}, {"dict": ...}, {"tuple": ...}, {"value": ...}."""
    from bigbrain_fx.frontend.translation.batch import Slot

    match template:
        case Slot(name):
            return {"tensor": name}
        case dict():
            return {"dict": [[key, _structure(value)] for key, value in template.items()]}
        case tuple() | list():
            kind = "list" if isinstance(template, list) else "tuple"
            return {kind: [_structure(value) for value in template]}
        case None | bool() | int() | float() | str():
            return {"value": template}
    return {"text": repr(template)}
