"""The model file's part of a bundle: its functions as text, and the places of a batch's entries.

This module reads the model file and writes nothing; the use of the bundle does not matter.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from bigbrain_fx.core import Dim, Input
from bigbrain_fx.emit.files.hf_model import hf_model_text
from bigbrain_fx.emit.files.local_modules import local_modules
from bigbrain_fx.emit.files.slicing import (
    SourceSlice,
    has_settings,
    slice_file,
)
from bigbrain_fx.emit.modules.kept import (
    LINES_BASE,
    LOSS_NAME,
    MODEL_NAME,
    lines_class,
    user_names,
)
from bigbrain_fx.emit.modules.layout import wrapped
from bigbrain_fx.emit.modules.names import Names
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import HF, is_hf, is_onnx
from bigbrain_fx.plan import Plan

EMPTY = SourceSlice("", ())


@dataclass(frozen=True)
class UsersCode:
    """Code that a bundle takes from the model file.

    Attributes:
        name: the file's.
        training: how the model is trained; for inference its data alone.
        functions: code called unchanged: functions, opaque modules, the loss.
    """

    name: str
    training: SourceSlice
    functions: SourceSlice

    @property
    def files(self) -> tuple[Path, ...]:
        """Modules and packages beside the model file that the bundle takes along."""
        return tuple(dict.fromkeys((*self.training.files, *self.functions.files)))


def users_code(plan: Plan) -> UsersCode:
    """Read the model file once, for all files of the bundle."""
    return UsersCode(source_file(plan).name, _training_slice(plan), _functions_slice(plan))


def source_file(plan: Plan) -> Path:
    """Return the model file, without the name of the model in it; of hf: its config.json."""
    if is_hf(plan.source.path) or is_onnx(plan.source.path):
        return Path(plan.source.path.removeprefix(HF).partition("?")[0])
    path, _, name = plan.source.path.rpartition(":")
    return Path(path if path and name.isidentifier() else plan.source.path)


def _training_slice(plan: Plan) -> SourceSlice:
    """Return what the bundle takes from the model file: for inference its data alone."""
    source, trains = plan.source, plan.mode == "train"
    named = {
        "batches": source.has_batches,
        "optimizer": source.has_optimizer and trains and source.optimizer is None,
        "lr_scale": source.has_lr_scale and trains,
        "scheduler": source.has_scheduler and trains,
        "loss_weight": source.has_loss_weight and source.has_batches and trains,
        "micro": source.has_micro and source.has_batches and trains,
        "example_batch": plan.graph.is_opaque_step and not source.has_batches,
    }
    wanted = [name for name, is_there in named.items() if is_there]
    if source.optimizer is not None and not source.optimizer.module and trains:
        wanted.append(source.optimizer.name)
    sets = is_model_file(plan) and has_settings(source_file(plan))
    return slice_file(source_file(plan), wanted, _seed(plan)) if wanted or sets else EMPTY


def _seed(plan: Plan) -> int | None:
    """Return what torch is seeded with before the model file is run; None where it is copied."""
    return plan.seed if plan.source.ships_file else None


def takes_file(plan: Plan) -> bool:
    """Whether a bundle takes the whole model file, since a copy of parts of it cannot be made."""
    return any(each.whole for each in _taken(plan))


def training_texts(plan: Plan) -> tuple[str, ...]:
    """Return what training.py of a bundle says in the user's own words: none, or one text."""
    own = users_code(plan) if is_model_file(plan) else None
    return (own.training.text,) if own and own.training.text else ()


def _taken(plan: Plan) -> tuple[SourceSlice, ...]:
    own = users_code(plan) if is_model_file(plan) else None
    return (own.training, own.functions) if own else ()


def _functions_slice(plan: Plan) -> SourceSlice:
    """Return the user's own Python that is called as it is: functions, leaf modules, the loss."""
    found = list(user_names(plan.graph, [op.name for op in plan.graph.ops]))
    texts = {node.name: node for node in map(lines_class, plan.graph.ops) if node}
    own = list(dict.fromkeys(n for m, n in found if m in ("", plan.source.module)))
    own = [name for name in own if name not in texts]
    own += [name for name in _read_by(texts.values(), plan) if name not in own]
    others = {m for m, _ in found} - {"", plan.source.module}
    taken = _of_model_file(plan, own)
    taken = (
        replace(taken, ours=_lines_text([*texts.values()], plan) + taken.ours) if texts else taken
    )
    files = local_modules(others, source_file(plan).parent) if is_model_file(plan) else ()
    return replace(taken, files=tuple(dict.fromkeys((*taken.files, *files))))


def _imports_of(classes: Iterable[ast.ClassDef], plan: Plan) -> Iterator[ast.FunctionDef]:
    """Yield the functions of lines that begin with an import of the model file."""
    for run in (node.body[-1] for node in classes):
        first = run.body[0] if isinstance(run, ast.FunctionDef) else run
        if isinstance(first, ast.ImportFrom) and first.module == plan.source.module:
            yield cast("ast.FunctionDef", run)


def _read_by(classes: Iterable[ast.ClassDef], plan: Plan) -> list[str]:
    """Return the names of the model file that lines of forwards read: a whole file gives them."""
    firsts = [cast("ast.ImportFrom", run.body[0]) for run in _imports_of(classes, plan)]
    return list(dict.fromkeys(alias.name for first in firsts for alias in first.names))


def _lines_text(classes: Sequence[ast.ClassDef], plan: Plan) -> str:
    """Return the classes of lines of the user's forwards, with an import of their base."""
    for run in _imports_of(classes, plan):
        del run.body[0]
    imported = f"import {LINES_BASE}"
    head = f"if __package__:\n    from .runtime {imported}\nelse:\n    from runtime {imported}\n"
    return "\n\n".join(["", head, *(f"{ast.unparse(node)}\n" for node in classes)])


def _of_model_file(plan: Plan, own: Sequence[str]) -> SourceSlice:
    """Return the text of functions.py: what the model file itself defines of these."""
    if list(own) == [MODEL_NAME] and is_hf(plan.source.path):
        return SourceSlice(hf_model_text(plan), (), ours=f"\n\n{MODEL_NAME} = model\n")
    if not own or not is_model_file(plan):
        return _require_no_file(plan, own)
    called = {MODEL_NAME: _model_name(plan), LOSS_NAME: "loss"}
    taken = slice_file(source_file(plan), [called.get(name, name) for name in own], _seed(plan))
    lines = [f"{name} = {called[name]}" for name in own if name in called]
    ours = "\n".join(["", *lines, ""]) if lines else ""
    return replace(taken, text=without_marks(taken.text), ours=ours)


def is_model_file(plan: Plan) -> bool:
    """Whether the plan's model came from a Python file."""
    return bool(plan.source.path) and source_file(plan).suffix == ".py"


def _require_no_file(plan: Plan, own: Sequence[str]) -> SourceSlice:
    """Refuse to write what only a model file could define."""
    wanted = {MODEL_NAME: "a leaf module", LOSS_NAME: "a loss that cannot be traced"}
    found = [wanted[name] for name in own if name in wanted]
    if found:
        raise InputError(
            f"{found[0]} is the user's own Python: a bundle takes it from a model file",
            code="BX0140b",
            help="write a model.py with model(), example_batch() and loss, and split that",
        )
    return EMPTY


def _model_name(plan: Plan) -> str:
    path, _, name = plan.source.path.rpartition(":")
    return name if path and name.isidentifier() else "model"


def without_marks(text: str) -> str:
    """Let code that marks leaves with `bigbrain_fx.leaf` run where bigbrain-fx is not installed."""
    lines = text.split("\n")
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.Import):
            own = [alias for alias in node.names if alias.name.split(".")[0] == "bigbrain_fx"]
            stand_ins = [_mark_class(alias.asname or "bigbrain_fx") for alias in own]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bigbrain_fx"):
            stand_ins = [f"def {alias.asname or alias.name}(module):" for alias in node.names]
            stand_ins = [f"{head}\n    return module" for head in stand_ins]
        else:
            continue
        if stand_ins:
            lines[node.lineno - 1 : node.end_lineno] = stand_ins
    return "\n".join(lines)


def _mark_class(name: str) -> str:
    """Return a class that stands in for the module bigbrain_fx."""
    return f"class {name}:\n    leaf = staticmethod(lambda module: module)"


def our_names(taken: SourceSlice, ours: Iterable[str]) -> dict[str, str]:
    """Return the names of our own constants beside the user's code, which may have the same."""
    nodes = list(ast.walk(ast.parse(taken.text)))
    names = Names(node.id for node in nodes if isinstance(node, ast.Name))
    return {name: names.fresh(name) for name in ours}


def inputs_lines(plan: Plan, constants: Mapping[str, str]) -> list[str]:
    """Write where each model input is in a batch, what it is, and which are not split."""
    entries = _read_entries(plan)
    rows = [
        f"    {entry.name!r}: {entry.key if _as_users(plan) else (entry.name,)!r},"
        for entry in entries
    ]
    whole = tuple(entry.name for entry in entries if not entry.batched)
    specs = [f"    {name!r}: {spec!r}," for name, spec in batch_specs(plan).items()]
    return [
        f"{constants['INPUTS']} = {{",
        *rows,
        "}",
        f"{constants['SPECS']} = {{",
        *specs,
        "}",
        *wrapped(f"{constants['WHOLE']} = {whole!r}", 0),
    ]


def _as_users(plan: Plan) -> bool:
    """Whether batches are the nests that the model file makes."""
    return plan.source.has_batches or plan.graph.is_opaque_step


def batch_specs(plan: Plan) -> dict[str, tuple[str, tuple[Dim, ...]]]:
    """Return the element type and shape of each model input in a whole batch."""
    return {e.name: (e.spec.dtype, _shape(e, plan)) for e in _read_entries(plan)}


def _read_entries(plan: Plan) -> list[Input]:
    used = {name for stage in plan.stages.stages for name in stage.inputs}
    if plan.mode == "eval":
        used |= set(plan.graph.outputs)  # a model may hand an input through
    return [entry for entry in plan.graph.inputs if entry.name in used]


def _shape(entry: Input, plan: Plan) -> tuple[Dim, ...]:
    """Return the shape of an entry in a whole batch; -1 where each batch has another size."""
    if entry.varies:
        return (-1,) * len(entry.spec.shape)
    if not entry.batched:
        return entry.spec.at(plan.rows).shape
    if plan.source.has_micro:
        return entry.spec.at(plan.rows).shape
    rows = plan.micro_batches * plan.rows
    return (rows, *entry.spec.at(rows).shape[1:])  # a trace of one size has that size there


OWN_BATCHES = (
    "",
    "# The model file has no `batches`: its example batch is taken again and again.",
    "batches = example_batches(__file__)",
)
OWN_EXAMPLES = (*OWN_BATCHES[:2], "batches = repeated(example_batch)")


def no_triple_blanks(lines: Sequence[str]) -> list[str]:
    """Leave out blank lines after two of them."""
    kept: list[str] = []
    for line in "\n".join(lines).splitlines():
        if line or kept[-2:] != ["", ""]:
            kept.append(line)
    return kept
