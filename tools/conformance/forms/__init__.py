"""Forms of training code: small model files as users write them, each with what must become of it.

    from tools.conformance.forms import find
    find("clamp-by-hook").source

A family is a text file of cells. A cell is a model file's own lines, put behind `prelude.txt`;
what it defines itself counts:

    # %% clamp-by-hook: every parameter's gradient is clamped by a hook
    #: refused, remedy clamp-in-optimizer      (or: opaque; warned; stopped, when the data show it)
    #: --micro-batches 4 --leaf Experts --replicas 2 --schedule zb-h1 --recompute all

Without the first of these lines it must be right; `dice` in it says that it draws random numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
_ELSE = ("opaque", "refused", "stopped", "unseen", "warned")
_HEAD = re.compile(r"^# %% (?P<name>[\w-]+): (?P<title>.+)$", re.MULTILINE)

__all__ = ["FOLDER", "Form", "find", "forms"]


@dataclass(frozen=True)
class Form:
    """One form of training code.

    Attributes:
        name, title, family: what it is.
        source: the whole model file.
        expected: right, warned, opaque, refused or stopped; `remedy` is the form that follows the
            advice, and is split.
        dice: it draws random numbers, a bundle by keys of its own: `verify` alone judges it.
        leaves, micro_batches: options of `split`; `options` are its others, by name.
    """

    name: str
    title: str
    family: str
    source: str
    expected: str = "right"
    remedy: str = ""
    dice: bool = False
    leaves: tuple[str, ...] = ()
    micro_batches: int = 2
    options: tuple[tuple[str, str], ...] = ()

    def option(self, name: str, default: str = "") -> str:
        """Return what an option of `split` is given."""
        return dict(self.options).get(name, default)


@cache
def forms() -> tuple[Form, ...]:
    """Return every form, family by family."""
    prelude = (FOLDER / "prelude.txt").read_text()
    files = sorted(path for path in FOLDER.glob("*.txt") if path.stem != "prelude")
    return tuple(form for path in files for form in _cells(path, prelude))


def find(name: str) -> Form:
    """Return a form by its name.

    Raises:
        KeyError: there is none of that name.
    """
    return {form.name: form for form in forms()}[name]


def _cells(path: Path, prelude: str) -> Iterator[Form]:
    _, *parts = _HEAD.split(path.read_text())
    for name, title, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        said = " ".join(re.findall(r"^#: (.*)$", text, re.MULTILINE))
        remedy = re.search(r"remedy ([\w-]+)", said)
        count = re.search(r"--micro-batches (\d+)", said)
        yield Form(
            name,
            title,
            path.stem,
            f"{prelude}\n{text.strip()}\n",
            expected=re.split("[, ]", said)[0] if said.startswith(_ELSE) else "right",
            remedy=remedy[1] if remedy else "",
            dice="dice" in said.split("--")[0],
            leaves=tuple(re.findall(r"--leaf ([\w.]+)", said)),
            micro_batches=int(count[1]) if count else 2,
            options=tuple(re.findall(r"--(?!micro-batches|leaf)([\w-]+) (\S+)", said)),
        )
