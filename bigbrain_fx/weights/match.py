"""Places in a model of a checkpoint's tensors: by name, by a prefix, by a tied twin.

This file knows names, shapes and element types; it reads no numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from bigbrain_fx.core import Param
from bigbrain_fx.errors import InputError
from bigbrain_fx.weights.checkpoint import Checkpoint, listed
from bigbrain_fx.weights.stored import Stored
from bigbrain_fx.weights.write import can_cast, same_numbers

_DEPTH = 3  # how many leading names a prefix may have: "model.language_model.x"


@dataclass(frozen=True)
class Matched:
    """Source of each tensor of the state dict, and notes for the user."""

    sources: Mapping[str, Stored]
    notes: tuple[str, ...]


def match(params: Sequence[Param], checkpoint: Checkpoint) -> Matched:
    """Find every parameter and persistent buffer of a model in a checkpoint.

    A name may lack a prefix that all names lack ("model." of a base model's checkpoint), or have
    one more. A tied tensor may be there under any of its names. Floating numbers are cast to the
    model's type. Tensors that the model computes itself (buffers outside its state dict) are passed
    over.

    Raises:
        InputError: tensors are missing, left over, or of another shape or kind.
    """
    wanted = {p.name: p for p in params if p.kind != "constant"}
    have = checkpoint.tensors
    name_in = names_in(list(wanted), have)
    doubles = _share(checkpoint, name_in, wanted, have)
    missing = [name for name in wanted if name not in name_in]
    left = _left_over(have, {*name_in.values(), *doubles}, params)
    if missing or left:
        raise _mismatch(checkpoint, missing, left, len(wanted))
    sources = {name: have[name_in[name]] for name in wanted}
    _require_fit(checkpoint, wanted, sources)
    return Matched(sources, _cast_notes(wanted, sources))


def names_in(wanted: Sequence[str], have: Iterable[str]) -> dict[str, str]:
    """Return model name -> checkpoint name: those that agree, then those a prefix makes agree."""
    there = set(have)
    found = {name: name for name in wanted if name in there}
    lacking = [name for name in wanted if name not in found]
    spare = there - set(found)
    if lacking and spare:
        found |= _by_prefix(lacking, spare)
    return found


def _by_prefix(lacking: Sequence[str], spare: Set[str]) -> dict[str, str]:
    """Try every prefix that the model or the checkpoint has, and keep what finds the most."""
    best: dict[str, str] = {}
    for prefix in _prefixes(lacking):
        pairs = ((n, n.removeprefix(prefix)) for n in lacking if n.startswith(prefix))
        best = max(best, {n: short for n, short in pairs if short in spare}, key=len)
    for prefix in _prefixes(sorted(spare)):
        pairs = ((n, prefix + n) for n in lacking)
        best = max(best, {n: longer for n, longer in pairs if longer in spare}, key=len)
    return best


def _prefixes(names: Iterable[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for depth in range(1, min(_DEPTH + 1, len(parts))):
            found[".".join(parts[:depth]) + "."] = None
    return list(found)


def _share(
    checkpoint: Checkpoint,
    name_in: dict[str, str],
    wanted: Mapping[str, Param],
    have: Mapping[str, Stored],
) -> list[str]:
    """Let all names of a tied tensor come from one; return the others, which hold the same."""
    groups: dict[str, list[str]] = {}
    for name, param in wanted.items():
        groups.setdefault(param.canonical, []).append(name)
    doubles = []
    for names in groups.values():
        there = [name_in[name] for name in names if name in name_in]
        for other in there[1:]:
            if not same_numbers(have[there[0]], have[other]):
                raise _untied(checkpoint, there[0], other)
        doubles += there[1:]
        name_in.update(dict.fromkeys(names, there[0]) if there else {})
    return doubles


def _untied(checkpoint: Checkpoint, first: str, second: str) -> InputError:
    return InputError(
        f"{first!r} and {second!r} are one tensor in the model, but differ in the checkpoint",
        code="BX3730",
        at=str(checkpoint.path),
        help="build the model untied (Hugging Face: tie_word_embeddings=false in config.json)",
    )


def _left_over(have: Mapping[str, Stored], used: Set[str], params: Sequence[Param]) -> list[str]:
    """Return the checkpoint's tensors that nothing in the model is, in the checkpoint's order."""
    computed = [param.name for param in params if param.kind == "constant"]
    passed_over = set(names_in(computed, set(have) - used).values())
    return [name for name in have if name not in used and name not in passed_over]


def _mismatch(
    checkpoint: Checkpoint, missing: Sequence[str], left: Sequence[str], count: int
) -> InputError:
    notes = []
    if missing:
        notes.append(f"missing in the checkpoint: {listed(missing)}")
    if left:
        notes.append(f"left over in the checkpoint: {listed(left)}")
    return InputError(
        f"the checkpoint does not fit the model: {len(missing)} of the model's {count} tensors are "
        f"missing, {len(left)} of the checkpoint's {len(checkpoint.tensors)} are left over",
        code="BX3731",
        at=str(checkpoint.path),
        notes=tuple(notes),
        help="give the checkpoint of this very class; or load it into the model in plain PyTorch "
        "and write it with safetensors.torch.save_model(model, 'model.safetensors')",
    )


def _require_fit(
    checkpoint: Checkpoint, wanted: Mapping[str, Param], sources: Mapping[str, Stored]
) -> None:
    wrong = [
        f"{name}: expected {param.spec}, found {found.dtype}{list(found.shape)}"
        for name, param in wanted.items()
        if (found := sources[name]).shape != param.spec.shape
        or not can_cast(found.dtype, param.spec.dtype)
    ]
    if wrong:
        raise InputError(
            f"{len(wrong)} tensors of the checkpoint have another shape or type than the model's",
            code="BX3732",
            at=str(checkpoint.path),
            notes=tuple(wrong[:5]),
            help="build the model with the sizes that the checkpoint was made with",
        )


def _cast_notes(wanted: Mapping[str, Param], sources: Mapping[str, Stored]) -> tuple[str, ...]:
    kinds = Counter(
        (sources[name].dtype, param.spec.dtype)
        for name, param in wanted.items()
        if sources[name].dtype != param.spec.dtype
    )
    return tuple(
        f"{count} tensors are {found} in the checkpoint and are cast to the model's {kind}"
        for (found, kind), count in kinds.items()
    )
