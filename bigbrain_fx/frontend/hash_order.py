"""What training does may go by the order of a set of texts, which Python shuffles in each process.

    the file, in a process of another PYTHONHASHSEED ─▶ optimizer, rates, batches ─┐
    the same, in one more                            ─▶ optimizer, rates, batches ─┴─▶ the same?

A vocabulary that is `list(set(text))` is another one in every process of a bundle, and after each
resume: `verify`, in one process, cannot see that. It is tried where the user's lines have a set, or
hash(), whose order may count; a PYTHONHASHSEED that the user has set holds for all processes.

Run as `python -P -m bigbrain_fx.frontend.hash_order '{"about": ...}'`; it prints what it found.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bigbrain_fx.errors import InputError
from bigbrain_fx.supervisor import run_group

HASH_SEED = "PYTHONHASHSEED"
LIMIT_S = 120.0  # a file that takes longer is not run again
SETS = frozenset({"set", "frozenset", "hash"})
UNORDERED = frozenset({"sorted", "len", "min", "max", "sum", "any", "all", "set", "frozenset"})


def require_no_hash_order(path: Path, question: Mapping[str, Any]) -> None:
    """Refuse a file of which training would be another one in each process.

    Args:
        path: of the model file.
        question: what training does once the file was run, as `first_calls.found` takes it.

    Raises:
        InputError: names the line of the set.
    """
    line = next(iter(lines_of_sets(path)), None)
    if line is None or os.environ.get(HASH_SEED, "random") != "random":
        return
    one, other = _found_with(1, question), _found_with(2, question)
    moved = [key for key in one if key.endswith("()") and other.get(key) != one[key]]
    again = _found_with(1, question) if moved else {}
    moved = [key for key in moved if again.get(key) == one[key]]  # no clock
    if moved:
        raise InputError(
            f"{moved[0]} goes by the order of a set of texts, or by hash() of one, which are other "
            "ones in each process: so would be what each device trains on, and each resume",
            code="BX2049",
            at=f"{path.name}:{line}",
            help="sort it, as in sorted(set(words)); for hash(text) take zlib.crc32(text.encode())",
        )


def lines_of_sets(path: Path) -> Iterator[int]:
    """Yield the lines on which a file makes a set, or a hash, whose order may count."""
    tree = ast.parse(path.read_bytes())
    harmless = {id(part) for node in ast.walk(tree) for part in _harmless(node)}
    for node in ast.walk(tree):
        if _may_count(node) and id(node) not in harmless:
            yield node.lineno  # type: ignore[attr-defined]  # an expression has a line


def _may_count(node: ast.AST) -> bool:
    match node:
        case ast.Set(elts=items):
            return not all(isinstance(i, ast.Constant) and isinstance(i.value, int) for i in items)
        case ast.Call(func=ast.Name(id=name)):
            return name in SETS
    return isinstance(node, ast.SetComp)


def _harmless(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of an expression whose order it does not show."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in UNORDERED:
            yield first
        case ast.Compare(ops=ops, comparators=parts):
            yield from (
                p for op, p in zip(ops, parts, strict=True) if isinstance(op, ast.In | ast.NotIn)
            )


def _found_with(seed: int, question: Mapping[str, Any]) -> Mapping[str, str]:
    """Return what training does in a process of that hash seed; nothing where that is not known."""
    words = (sys.executable, "-P", "-m", "bigbrain_fx.frontend.hash_order", json.dumps(question))
    try:
        done = run_group(words, LIMIT_S, {**os.environ, HASH_SEED: str(seed)})
        found: Mapping[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return found


def main() -> None:
    """Run the file as a new process does, and print what training does then."""
    from bigbrain_fx.frontend.first_calls import FirstCalls, found
    from bigbrain_fx.frontend.users_code import run_file, users_folder

    question = json.loads(sys.argv.pop())  # a model file may parse words of its own, and has none
    calls = FirstCalls.asked(question["about"])
    with os.fdopen(os.dup(1), "w") as said:
        os.dup2(2, 1)  # the user's own prints
        with users_folder(calls.path.parent):
            answer = found(run_file(calls.path, calls.seed), question)
        json.dump(dict(answer), said)


if __name__ == "__main__":
    main()
