"""The last rung of a split: a step that no trace can hold runs whole on one device.

    split ─▶ refused for the user's code ─▶ the same with the whole step as one op ─▶ a warning

Nothing that eager PyTorch trains is turned away. Three kinds of refusals remain: models on which a
plain step fails, too; options that divide a step; and a few refusals by their code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from bigbrain_fx.bundles.found_model import FoundModel
from bigbrain_fx.bundles.micro_batches import Planned, weighing
from bigbrain_fx.errors import BigBrainError, InputError, NoPlanError
from bigbrain_fx.plan import Options, Plan

_Result = TypeVar("_Result")
_FINAL = {
    "BX2046": "the file draws without a seed: a replacement would have other numbers",
    "BX0140l": "--opaque names no module, whatever a device runs",
}
OF_ESTIMATES = {**_FINAL, "BX0101": "a model without numbers gives no answer, and `split` has them"}
"""Code of a refusal, or its number -> why it stands though eager PyTorch trains the model."""
_OTHER_BATCH = "BX0135"
_PLAIN_FAILS = "BX2195"
_FAILS_PLAIN = {"BX0151", "BX2105", "BX2141", "BX2156"}  # these say so already
"""Code of a batch that does not fit what the model was traced with."""
_OF_PARTS = ("BX2104", "BX3810", "BX1251", _OTHER_BATCH)
"""Codes of what may be for the micro-batches: a model, a trace or a bundle that does not take one's
rows; a batch of another shape, which an opaque loss takes whole.
"""
_MOST = 3  # modules that become opaque one after another for rehearsals


def with_opaque_step(
    options: Options,
    make: Callable[[BigBrainError | None], _Result],
    *,
    is_open: bool = True,
    final: Collection[str] = _FINAL,
) -> _Result:
    """Make something of a model; where its code is refused, of its whole step as one op.

    Args:
        options: what was asked for.
        make: makes it, of a trace, or of one op because of a refusal.
        is_open: whether a model file says how the model is built, and no other plan its places.
        final: codes of refusals that stand.

    Raises:
        BigBrainError: the refusal, where no device could run the step whole, either.
    """
    try:
        return make(None)
    except BigBrainError as error:
        if not is_open or not may_run_whole(error, options, final):
            raise
        refusal = error
    try:
        return make(refusal)
    except BigBrainError as error:
        raise noted(refusal, error) from error


def with_one_micro_batch(
    options: Options,
    make: Callable[[Options, BigBrainError | None], _Result],
    tell: Callable[[_Result, str], _Result],
    refusal: BigBrainError | None,
    *,
    is_open: bool,
) -> _Result:
    """Make something of a model; where its micro-batches cannot be run, with one.

    Args:
        options: what was asked for.
        make: makes it, given options, and why the whole step is one op.
        tell: adds a sentence for the user.
        refusal: as in `with_modules_whole`.
        is_open: as in `with_opaque_step`.

    Raises:
        BigBrainError: where one micro-batch does not do, either: of both, the one that is about the
            user's code.
    """
    try:
        return make(options, refusal)
    except BigBrainError as error:
        count, copies = options.micro_batches or 1, options.replicas or 1
        is_last = refusal or options.strict or not is_open or count < 2 or copies > 1
        if is_last or error.code not in _OF_PARTS:
            raise
        first = error
    try:
        made = make(replace(options, micro_batches=1), None)
    except BigBrainError as error:
        raise (first if first.of_code else error) from None
    return tell(made, f"one micro-batch: {count} cannot be run: {first.what}")


def with_modules_whole(
    options: Options,
    make: Callable[[Sequence[BigBrainError], BigBrainError | None], _Result],
    refusal: BigBrainError | None,
    *,
    is_open: bool,
) -> _Result:
    """Make something of a model; where a rehearsal names a module, with that one opaque, again.

    Args:
        options: what was asked for.
        make: makes it, with the modules opaque that errors name.
        refusal: why the whole step is one op; None where it is not.
        is_open: as in `with_opaque_step`.

    Raises:
        BigBrainError: the first, where opaque modules do not do, either.
    """
    apart: tuple[BigBrainError, ...] = ()
    while True:
        try:
            return make(apart, refusal)
        except BigBrainError as error:
            known = {each.apart for each in apart} | {None}  # whole, it still differs: it has state
            is_last = error.apart in known or refusal or options.strict or not is_open
            if is_last or len(apart) == _MOST:
                raise (apart[0] if apart else error) from None
            apart = (*apart, error)


def with_loss_whole(
    options: Options,
    make: Callable[[Sequence[BigBrainError], BigBrainError | None, bool], _Result],
    apart: Sequence[BigBrainError],
    refusal: BigBrainError | None,
    *,
    is_open: bool,
) -> _Result:
    """Make something of a model; where a batch does not fit its trace, with an opaque loss, again.

    Entries that only the loss reads may then have another shape in each batch.

    Args:
        options: of the user.
        make: makes it, given `apart`, `refusal`, and whether the loss is opaque.
        apart: modules that are opaque, by the errors that named them.
        refusal: as in `with_modules_whole`.
        is_open: as in `with_opaque_step`.

    Raises:
        BigBrainError: the first, where an opaque loss does not do, either.
    """
    try:
        return make(apart, refusal, False)
    except BigBrainError as error:
        is_cut = max(options.micro_batches or 1, options.replicas or 1) > 1
        if error.code != _OTHER_BATCH or refusal or options.strict or is_cut or not is_open:
            raise
        first = error
    try:
        return make(apart, None, True)
    except BigBrainError as error:
        if error.apart is not None:
            raise  # a module that differs: it is opaque next
        raise first from None


def may_run_whole(error: BigBrainError, options: Options, final: Collection[str] = _FINAL) -> bool:
    """Whether a refusal is one to split the user's code, and no option divides its step."""
    known = error.code in final or error.family in final
    return error.of_code and not known and not options.strict and not divides(options)


def divides(options: Options) -> bool:
    """Whether an option divides a step, or changes it."""
    return any(_dividing(options))


def _dividing(options: Options) -> Iterator[str]:
    """Yield the options that divide a step, or change it, which nobody can do from outside."""
    asked = {
        "--mode eval": options.mode == "eval",
        "--tensor-parallel": options.wants_groups,
        "--zero": options.zero_stage,
        "--all-reduce-order": options.all_reduce_order != "replica",
        "--offload": options.offload,
        "--asynchronous": options.asynchronous,
        "--compile": options.compiled,
        "--quantize": options.quantize,
        "--place": options.place or options.pins,
    }
    yield from (flag for flag, value in asked.items() if value)


def noted(
    refusal: BigBrainError, error: BigBrainError, where: str = "on one device"
) -> BigBrainError:
    """Return the refusal; it says why the step cannot run whole."""
    hint = f"; {error.help}" if error.help else ""
    note = f"nor can the whole step run {where}: {error.what}{hint}"
    is_said = error.code == _PLAIN_FAILS and refusal.code in _FAILS_PLAIN
    notes = (*refusal.notes, *(() if is_said else (note,)), *error.notes)
    refusal.notes = tuple(dict.fromkeys(notes))
    return refusal


def planned_whole(
    found: FoundModel,
    options: Options,
    make: Callable[[FoundModel, Options], Planned],
    refusal: BigBrainError,
) -> Planned:
    """Plan one device for the whole step; return the plan and what the user should know.

    Raises:
        InputError: replicas are asked for, and parts of a batch train something else.
        BigBrainError: as `make` does.
    """
    wanted = options.micro_batches or options.replicas or 1
    whole = replace(options, tensor=1, schedule=None, recompute=None, defer=None, rows=None)
    notes: tuple[str, ...] = ()
    fault = _fault(found, wanted) if wanted > 1 else ""
    if fault:
        _require_one_replica(options, fault)
        notes = (f"one micro-batch: {wanted} would train something else: {fault}",)
        wanted = 1
    try:
        plan, said = make(found, replace(whole, micro_batches=wanted))
    except NoPlanError:
        plan, said = _smaller(found, whole, make, wanted)
    return _weighed(found, plan), (*said, _warning(plan, refusal), *notes)


def _smaller(
    found: FoundModel,
    options: Options,
    make: Callable[[FoundModel, Options], Planned],
    count: int,
) -> Planned:
    """Plan with the fewest micro-batches that fit the memory, and train the same.

    Raises:
        NoPlanError: none do.
    """
    last = count
    for more in range(count + 1, found.graph.batch + 1):
        if found.graph.batch % more == 0 and not _fault(found, more):
            last = more
            try:
                return make(found, replace(options, micro_batches=more))
            except NoPlanError:
                continue
    return make(found, replace(options, micro_batches=last))


def _fault(found: FoundModel, count: int) -> str:
    """Return why so many micro-batches do not train what the batch trains; empty where they do."""
    if found.graph.batch % count:
        return f"{found.graph.batch} rows do not divide into {count}"
    if found.source.offsets or not any(entry.batched for entry in found.graph.inputs):
        return "nobody knows where the rows of this batch are"
    effect = found.compare(count)
    if effect.divided:
        return f"{effect.divided[0]} counts the whole batch, and is not divided"
    if effect.is_equal and not effect.not_compared:
        return ""
    return effect.cause or effect.difference


def _require_one_replica(options: Options, fault: str) -> None:
    if (options.replicas or 1) > 1 or options.replica_shares:
        raise InputError(
            "replicas divide the rows of a batch, and parts of this one train something else than "
            f"the whole: {fault}",
            code="BX3160",
            help="leave --replicas out",
        )


def _weighed(found: FoundModel, plan: Plan) -> Plan:
    return weighing(plan, found.compare(plan.micro_batches)) if plan.micro_batches > 1 else plan


def _warning(plan: Plan, refusal: BigBrainError) -> str:
    """Say what runs whole, why, and what that costs."""
    used, every = plan.stages.devices, plan.cluster.devices
    idle = len(every) - len(used)
    place = f"{refusal.at}: " if refusal.at else ""
    code = f" ({refusal.code})" if refusal.code else ""
    copies = "" if plan.stages.micros else "--replicas N trains the rows of a batch on N devices. "
    return (
        f"the training step of {plan.graph.name} is opaque: {', '.join(used)} runs it as the model "
        f"file has it, nothing is split{f', {idle} of {len(every)} devices idle' if idle else ''}. "
        f"No trace holds {place}{refusal.what}{code}. --strict refuses instead, with what to "
        f"change. {copies}After a death, what the file keeps outside of modules, optimizer and "
        "scheduler (globals, closures, iterators) begins anew"
    )
