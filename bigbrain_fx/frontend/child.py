"""The child process of a capture session: load the model file, capture, then answer requests.

Run as `python -m bigbrain_fx.frontend.child '{"location": ...}'`. Standard output carries one JSON
object a line; what the user's code prints goes to stderr. It ends with its standard input, or with
its parent.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn, cast

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.prints import printed_once
from bigbrain_fx.frontend.service import Replies

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from bigbrain_fx.core import LossCount
    from bigbrain_fx.frontend.early import Early
    from bigbrain_fx.frontend.micro_batches.effect import MicroBatchEffect
    from bigbrain_fx.frontend.modelfile import ModelFile
    from bigbrain_fx.frontend.quantised import QuantisedModel
    from bigbrain_fx.frontend.tracing.captured import Captured

_OBJECTS_A_SWEEP = 200_000
"""Objects made between two sweeps for garbage: torch's own modules are a million that all stay."""


def main() -> NoReturn:
    """Capture, report, and serve requests until standard input ends; so does this process then."""
    gc.set_threshold(_OBJECTS_A_SWEEP, 20, 100)
    replies, prints = Replies(), printed_once()
    wanted = json.loads(sys.argv.pop())  # a model file may parse words of its own, and has none
    service: list[_Service] = []

    def start() -> Mapping[str, object]:
        service.append(_Service(wanted))
        return service[0].report()

    if replies.reply(start):
        for line in replies.requests:
            replies.reply(partial(service[0].serve, json.loads(line)))
    if prints is not None:
        prints.finish(str(wanted["location"]))
    sys.stdout.flush()  # what the user's code printed
    sys.stderr.flush()
    os._exit(0)  # all is written; taking torch and the model down in order takes a second


class _Service:
    """The captured model, and what can be asked of it."""

    def __init__(self, wanted: Mapping[str, object]) -> None:
        import torch  # noqa: F401  # counted apart: any program that trains pays for it

        _settle_what_torch_finds()
        started_s = time.perf_counter()
        from bigbrain_fx.frontend.modelfile import load_model_file

        location, seed = str(wanted["location"]), cast("int", wanted["seed"])
        self.meta, self.seed = bool(wanted["meta"]), seed
        blank = bool(wanted["blank"])
        self.cache = cast("int", wanted["cache"])
        self.fresh = self._stay_fresh(location)
        self.early: Early | None = None
        self.file = load_model_file(
            location,
            seed=seed,
            meta=self.meta,
            blank=blank,
            cache=self.cache,
            once_run=self._stay_early,
        )
        sys.path.insert(0, str(self.file.path.parent))  # forward may import, too
        self.quantised = _quantised(self.file, wanted.get("quantize"))
        self.captured = _capture(self.file, wanted)
        self.fixed: tuple[object, ...] = ()
        self.loss_count: LossCount | None = None  # by which micro-batches weigh, once it is found
        if wanted["training"] and not self.meta and not blank:
            _require_steady(self.file, seed)
            self.fixed = (*_fixed(self.file), *_apart_entries(self.file, self.captured))
        if wanted["training"] and self.meta:
            _require_optimizer(self.file)
        self.captured = _require_uneven(self.file, self.captured, bool(wanted["training"]))
        _require_read_by_layers(self.captured, self.quantised)
        _write_graph(self.captured, Path(str(wanted["graph"])))
        self.capture_s = time.perf_counter() - started_s

    def _stay_fresh(self, location: str) -> Early | None:
        """Let a fork stay as this process is before the file is run, for `try_copies`."""
        from bigbrain_fx.frontend.early import Early
        from bigbrain_fx.frontend.first_calls import found_in_copy
        from bigbrain_fx.frontend.location import is_hf, is_onnx, split_location

        if self.meta or is_hf(location) or is_onnx(location):
            return None
        return Early(partial(found_in_copy, split_location(location)[0], self.seed))

    def _stay_early(self, module: ModuleType) -> None:
        """Let a fork stay as this process is before model() is called, for `try_calls`."""
        from bigbrain_fx.frontend.between_calls import answered
        from bigbrain_fx.frontend.early import Early

        if not self.meta:
            self.early = Early(partial(answered, module))

    def report(self) -> Mapping[str, object]:
        """Say what was captured; the graph itself is in its file."""
        from bigbrain_fx.frontend.tracing.optimizer import optimizer_facts
        from bigbrain_fx.frontend.tracing.uneven import pads

        file, parameters = self.file, {id(p): p for p in self.file.model.parameters()}
        optimizer = optimizer_facts(file.model, file.optimizer)
        elsewhere = self.captured.elsewhere
        facts = {
            "path": file.location if file.is_data else str(file.path),
            "name": file.name,
            "module": _module_name(file),
            "has_loss": file.loss is not None,
            "has_batches": file.batches is not None,
            "has_optimizer": file.optimizer is not None,
            "has_lr_scale": file.lr_scale is not None,
            "has_scheduler": file.scheduler is not None,
            "has_loss_weight": file.loss_weight is not None,
            "clip_norm": file.clip_norm,
            "grad_scaler": file.grad_scaler,
            "autocast": file.autocast,
            "drop_last": file.drop_last,
            "cache": self.cache,
            "positions": _positions(file),
            "batch_dims": {e.name: e.dim for e in self.captured.batch.entries if e.dim},
            "offsets": {e.name: e.per_row for e in self.captured.batch.entries if e.per_row},
            "pad": pads(self.captured.batch, file.pad),
            "fixed": self.fixed,
            "parameters": sum(p.numel() for p in parameters.values()),
            "functions": sorted(self.captured.functions),
            "elsewhere": elsewhere and asdict(elsewhere),
            "optimizer_state": optimizer.state,
            "optimizer_temporaries": optimizer.temporaries,
            "optimizer_leftover": optimizer.leftover,
            "optimizer_states": optimizer.states,
        }
        note = optimizer.note if self.captured.graph.training else None
        warnings = (*self.captured.warnings, *filter(None, [note]))
        if self.quantised is not None:
            facts |= {"quantize": "int8", "quantize_error": self.quantised.error}
            warnings = (*warnings, *filter(None, [self.quantised.note]))
        return {"facts": facts, "warnings": warnings, "capture_s": self.capture_s}

    def serve(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Answer one request."""
        if request["do"] == "weights":
            files = cast("Mapping[str, list[str]]", request["files"])
            self.write_weights(Path(str(request["folder"])), files)
        elif request["do"] == "batch":
            self.write_batch(Path(str(request["path"])))
        elif request["do"] == "convert":
            return {"tensors": self.convert(str(request["path"]), Path(str(request["folder"])))}
        elif request["do"] == "optimizer":
            held = cast("Mapping[str, list[str]]", request["held"])
            how = {name: bool(request[name]) for name in ("here", "by_pieces")}
            return {"note": self.try_optimizer(held, request["shards"], **how)}
        elif request["do"] == "copies":
            return self.try_copies(cast("list[str]", request["texts"]))
        elif request["do"] == "calls":
            kept = frozenset(cast("list[str]", request["kept"]))
            return {"note": self.try_calls(kept, trains=bool(request["trains"]))}
        elif request["do"] == "micro-batches":
            return {"effect": asdict(self.micro_batch_effect(cast("int", request["count"])))}
        elif request["do"] == "rules":
            from bigbrain_fx.frontend.tracing.trying import failed_rules

            return {"failed": failed_rules(Path(str(request["path"])))}
        elif request["do"] in ("lay", "prove"):
            return rewriting(str(request["do"]), Path(str(request["path"])))
        else:
            expected = (
                "weights, batch, convert, optimizer, copies, calls, micro-batches, rules, lay or "
                "prove"
            )
            raise InputError(f"expected {expected}, found {request['do']!r}", code="BX2028")
        return {"done": request["do"]}

    def write_weights(self, folder: Path, files: Mapping[str, list[str]]) -> None:
        """Write the named tensors to safetensors files."""
        from safetensors.torch import save_file

        from bigbrain_fx.frontend.tracing.blank import is_blank
        from bigbrain_fx.weights import as_umask_says

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
            save_file(_apart({name: self.captured.tensors[name] for name in names}), folder / file)
        as_umask_says(*(folder / file for file in files))

    def convert(self, path: str, folder: Path) -> Mapping[str, tuple[str, str]]:
        """Return the file and key of each tensor of a checkpoint, by the model's names."""
        from bigbrain_fx.frontend.hf.weights import converted
        from bigbrain_fx.weights import read_checkpoint

        found = converted(self.file.model, read_checkpoint(path), folder)
        return {name: (str(stored.file), stored.key) for name, stored in found.items()}

    def try_optimizer(
        self, held: Mapping[str, list[str]], shards: object, *, here: bool, by_pieces: bool
    ) -> str | None:
        """Require that the optimizer and its scheduler can be made once per device."""
        from bigbrain_fx.frontend.tracing.scheduled import require_made_per_device

        file = self.file
        if file.optimizer is not None and shards:
            _require_divided(file.model, file.optimizer, shards)
        made = file.optimizer, file.scheduler
        is_scaled = file.grad_scaler is not None
        return require_made_per_device(
            file.model, *made, held, is_scaled=is_scaled, here=here, by_pieces=by_pieces
        )

    def try_copies(self, texts: list[str]) -> Mapping[str, object]:
        """Say what copies of parts of the model file would have, or do, otherwise than the file."""
        from bigbrain_fx.frontend.copies import is_plain, try_copies
        from bigbrain_fx.frontend.first_calls import FirstCalls, doing_otherwise

        if self.file.is_data:
            return {"unlike": (), "note": None}
        found = try_copies(self.file.path, texts, self.seed, self.file.before)
        unlike = found.unlike
        if texts and self.early and self.fresh and not (unlike or is_plain(self.file.path)):
            about = FirstCalls.of(self.file, self.seed, frozenset(), trains=True)
            unlike = doing_otherwise(about, texts[0], self.early, self.fresh)
        return {"unlike": unlike, "note": found.note}

    def try_calls(self, kept: frozenset[str], *, trains: bool) -> str | None:
        """Require that training goes by nothing that model() or example_batch() sets, or a hash."""
        from bigbrain_fx.frontend.between_calls import require_nothing_between
        from bigbrain_fx.frontend.first_calls import FirstCalls, require_nothing_left
        from bigbrain_fx.frontend.hash_order import require_no_hash_order

        if self.early is None:
            return None
        about = FirstCalls.of(self.file, self.seed, kept, trains=trains)
        require_no_hash_order(self.file.path, about.asking(()))
        if trains:
            require_nothing_between(about, self.file, self.early)
        return require_nothing_left(about, self.early)

    def micro_batch_effect(self, count: int) -> MicroBatchEffect:
        """Compare a step on the example batch with one in so many micro-batches."""
        from bigbrain_fx.frontend.micro_batches.measure import Training, micro_batch_effect

        file = self.file
        draw = None if file.batches is None else partial(_second_batch, file, self.seed)
        training = Training(file.model, file.loss, file.autocast, file.loss_weight, draw)
        effect = micro_batch_effect(training, self.captured, count)
        self.loss_count = effect.loss_count if effect.is_equal else None
        return effect

    def write_batch(self, path: Path) -> None:
        """Write the example batch's tensors, and its structure as JSON beside them."""
        from safetensors.torch import save_file

        from bigbrain_fx.weights import as_umask_says

        batch = self.captured.batch
        if not self.meta:
            tensors = {entry.name: entry.tensor for entry in batch.entries}
            save_file(_apart({**tensors, **self._row_counts()}), path)
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


def _second_batch(file: ModelFile, seed: int) -> object:
    """Return the second batch of the user's data; all generators are as they were afterwards."""
    from itertools import islice

    from bigbrain_fx.frontend.tracing.dice import random_state_kept
    from bigbrain_fx.runtime import left_alone

    assert file.batches is not None
    with random_state_kept(), left_alone(file.batches):
        return next(islice(file.batches(seed), 1, None))


def rewriting(do: str, path: Path) -> Mapping[str, object]:
    """Lay out the rewritten graph that a file has, in the same file; or prove its places."""
    from bigbrain_fx.frontend.tracing.rewrites import laid_file, proofs

    if do == "lay":
        return {"why": laid_file(path)}
    return {"proofs": [[each.apart, each.same_bits, each.why] for each in proofs(path)]}


def _settle_what_torch_finds() -> None:
    """Let torch look for modules that it can do without before the user's folder is on sys.path.

    One there that is called like one of them would be taken for it; see `users_code`, too.
    """
    from torch.fx.experimental import validator  # noqa: F401  # it looks for z3


def _quantised(file: ModelFile, quantize: object) -> QuantisedModel | None:
    if quantize is None:
        return None
    from bigbrain_fx.frontend.quantised import quantise

    return quantise(file.model)


def _require_read_by_layers(captured: Captured, quantised: QuantisedModel | None) -> None:
    if quantised is not None:
        from bigbrain_fx.frontend.quantised import require_read_by_layers

        require_read_by_layers(captured.graph)


def _capture(file: ModelFile, wanted: Mapping[str, object]) -> Captured:
    from bigbrain_fx.frontend.tracing.trace import capture

    return capture(
        file.model,
        file.example_batch,
        file.loss,
        training=bool(wanted["training"]),
        name=type(file.model).__name__,
        micro_batch=cast("int | None", wanted["micro_batch"]),
        assume=cast("Mapping[str, bool]", wanted["assume"]),
        leaves=(*file.leaves, *cast("list[str]", wanted["leaves"])),
        autocast=file.autocast,
        loss_needed=not wanted["meta"],
        batch_dims=file.batch_dims,
    )


def _require_divided(model: Module, make: Callable[..., object], shards: object) -> None:
    from pydantic import TypeAdapter

    from bigbrain_fx.core import Shard
    from bigbrain_fx.frontend.tracing.divided import require_divided

    found = TypeAdapter(tuple[Shard, ...]).validate_python(shards)
    require_divided(model, make, found)


def _require_optimizer(file: ModelFile) -> None:
    """Refuse an optimizer whose code fails: `estimate` asks how much it holds, and no more."""
    from bigbrain_fx.frontend.tracing.optimizer import optimizer_facts
    from bigbrain_fx.frontend.tracing.parted import require_runnable

    if file.optimizer is not None and not optimizer_facts(file.model, file.optimizer).measured:
        require_runnable(file.model, file.optimizer)


def _require_steady(file: ModelFile, seed: int) -> None:
    from bigbrain_fx.frontend.between_calls import require_constants_kept
    from bigbrain_fx.frontend.tracing.outside import (
        require_fed_nothing,
        require_optimizer_apart,
    )
    from bigbrain_fx.frontend.tracing.side_effects import require_no_side_effects
    from bigbrain_fx.frontend.tracing.values import require_steady

    require_constants_kept(file)
    step = file.model, file.example_batch, file.loss, file.autocast
    require_no_side_effects(
        *step,
        batches=file.batches,
        lr_scale=file.lr_scale,
        optimizer=file.optimizer,
        scheduler=file.scheduler,
    )
    if file.optimizer is not None:
        require_optimizer_apart(*step, file.optimizer, file.batches)
    rates = {"lr_scale()": file.lr_scale, "scheduler()": file.scheduler}
    require_fed_nothing(*step, {**rates, "batches()": file.batches})
    if file.batches is not None:
        batches = partial(file.batches, seed)
        require_steady(file.model, file.example_batch, file.loss, batches, file.autocast)


def _fixed(file: ModelFile) -> tuple[object, ...]:
    from bigbrain_fx.frontend.tracing.fixed import fixed_entries

    if file.batches is None:
        return ()  # the example again and again
    return fixed_entries(file.model, file.example_batch, file.loss, file.autocast)


def _apart_entries(file: ModelFile, captured: Captured) -> tuple[object, ...]:
    """Return the entries that are written, and that no other may be the memory of."""
    from bigbrain_fx.runtime import APART

    if file.batches is None:
        return ()
    entries = captured.batch.entries
    return tuple((entry.key, APART) for entry in entries if entry.name in captured.written)


def _require_uneven(file: ModelFile, captured: Captured, training: bool) -> Captured:
    from bigbrain_fx.frontend.tracing.uneven import require_padding, require_rows

    require_rows(file.drop_last, captured, training)
    said = require_padding(file.model, file.loss, file.pad, captured, file.autocast)
    return replace(captured, warnings=(*captured.warnings, said)) if said else captured


def _module_name(file: ModelFile) -> str:
    if file.is_data:
        return ""  # no module of the user's
    named = [n for n, m in sys.modules.items() if getattr(m, "__file__", None) == str(file.path)]
    return named[0] if named else file.path.stem


def _write_graph(captured: Captured, path: Path) -> None:
    from pydantic import TypeAdapter

    from bigbrain_fx.core import Graph

    path.write_bytes(TypeAdapter(Graph).dump_json(captured.graph))


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors with a storage of their own: safetensors stores no ties."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        found[name] = plain.cpu()
    return found


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


if __name__ == "__main__":
    main()
