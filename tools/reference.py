"""Write the generated pages of docs/reference: `python -m tools.reference`.

They are the public names as `bigbrain_fx` exports them (api), the files that a bundle copies and
which bundles copy them (bundle-files), the codes of all errors (errors), what does not go together
(compatibility), the fields of cluster.json (cluster-file) and the rows of figures.json (figures). A
test holds the pages equal to the code.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import bigbrain_fx
from bigbrain_fx.emit import (
    CHECKS,
    KNOWN,
    PARTS,
    REPLACING,
    UNIMPORTED,
    WHOLE_DEVICE,
    Part,
    room_files,
    runtime_files,
    ways_into,
)
from bigbrain_fx.plan import RULES
from tools import cluster_page, figures_page
from tools.error_codes import Site, collected

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ROOT / "bigbrain_fx"
API = ROOT / "docs/reference/api.md"
FILES = ROOT / "docs/reference/bundle-files.md"
ERRORS = ROOT / "docs/reference/errors.md"
COMPATIBILITY = ROOT / "docs/reference/compatibility.md"
CLUSTER = ROOT / "docs/reference/cluster-file.md"
FIGURES = ROOT / "docs/reference/figures.md"
TRAIN = "from runtime import Bundle, Hooks, Training, main, Device, Stage, adamw, example_batches\n"
INFER = "from runtime import Inference, infer_in_process, infer_main, InferenceDevice, Stage\n"


def main() -> None:
    """Write the pages."""
    API.write_text(api_page(), encoding="utf-8")
    FILES.write_text(files_page(), encoding="utf-8")
    ERRORS.write_text(errors_page(collected(ROOT).sites), encoding="utf-8")
    COMPATIBILITY.write_text(compatibility_page(), encoding="utf-8")
    CLUSTER.write_text(cluster_page.page(), encoding="utf-8")
    FIGURES.write_text(figures_page.page(figures_page.ROWS.read_text()), encoding="utf-8")


# --------------------------------------------------------------------------- the public names


def api_page() -> str:
    """Return docs/reference/api.md."""
    lines = [
        "# Python API",
        "",
        "Every public name of `bigbrain_fx`, written by `python -m tools.reference`. What a name",
        "does, argument by argument, is in its docstring: `help(bigbrain_fx.split)`.",
        "",
        *_section("Verbs", inspect.isroutine),
        *_section("Nouns", lambda named: inspect.isclass(named) and not _is_error(named)),
        *_section("Errors", _is_error),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(title: str, belongs: object) -> Iterator[str]:
    assert callable(belongs)
    yield from (f"## {title}", "")
    for name in sorted(bigbrain_fx.__all__):
        named = getattr(bigbrain_fx, name)
        if belongs(named):
            yield from (f"### `{name}`", "", *_signature(name, named), _first(named), "")


def _is_error(named: object) -> bool:
    return inspect.isclass(named) and issubclass(named, Exception)


def _signature(name: str, named: object) -> list[str]:
    """Return a call of it, an argument a line; nothing for errors and protocols."""
    if _is_error(named) or getattr(named, "_is_protocol", False):
        return []
    assert callable(named)
    found = inspect.signature(named)
    arguments = [f"    {_argument(each)}," for each in found.parameters.values()]
    given = found.return_annotation
    end = f") -> {given}" if isinstance(given, str) and not inspect.isclass(named) else ")"
    text = [f"{name}(", *_starred(found, arguments), end] if arguments else [f"{name}({end}"]
    return ["```python", *text, "```", ""]


def _starred(found: inspect.Signature, arguments: list[str]) -> list[str]:
    """Put the star before the first argument that has to be named."""
    kinds = [each.kind for each in found.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY not in kinds or inspect.Parameter.VAR_POSITIONAL in kinds:
        return arguments
    at = kinds.index(inspect.Parameter.KEYWORD_ONLY)
    return [*arguments[:at], "    *,", *arguments[at:]]


def _argument(each: inspect.Parameter) -> str:
    shown = str(each.replace(annotation=each.empty, default=each.empty))  # with its stars
    kind = "" if each.annotation is each.empty else f": {each.annotation}"
    has_text = isinstance(each.default, str | int | float | bool | tuple | type(None))
    is_here = sys.executable in repr(each.default)  # a path of this machine is no reference
    default = repr(each.default) if has_text and not is_here else "..."  # or a factory
    return f"{shown}{kind}" + ("" if each.default is each.empty else f" = {default}")


def _first(named: object) -> str:
    return (inspect.getdoc(named) or "").partition("\n\n")[0].replace("\n", " ")


# --------------------------------------------------------------------------- copied files


def files_page() -> str:
    """Return docs/reference/bundle-files.md."""
    runtime = ROOMS / "runtime"
    of_plan = [WHOLE_DEVICE, *(part for part in PARTS if part != REPLACING)]
    rare = ways_into(of_plan, "runtime")
    less = (WHOLE_DEVICE, CHECKS, KNOWN, *PARTS)
    held = {
        "train": runtime_files(runtime, [TRAIN], without=rare | ways_into((CHECKS,), "runtime")),
        "lean": runtime_files(runtime, [TRAIN], without=ways_into(less, "runtime")),
        "infer": runtime_files(runtime, [INFER], without=rare),
    }
    supervisor = room_files(
        ROOMS / "supervisor", UNIMPORTED["supervisor"], ways_into(of_plan, "supervisor")
    )
    lines = [
        "# Files that a bundle copies",
        "",
        "Written by `python -m tools.reference`. A bundle copies what its own files import:",
        "a training bundle all with `train`, one of `split --lean` those with `lean`, one for",
        "inference those with `infer`; others where its plan, or `--with`, has the feature named.",
        *_table("runtime", held),
        *_table("supervisor", {"train": supervisor}),
    ]
    return "\n".join(lines) + "\n"


def _table(room: str, held: Mapping[str, Collection[str]]) -> Iterator[str]:
    yield from ("", f"| file of `{room}/` | what it is for | in |", "|---|---|---|")
    of_feature = {file: part.name for part in PARTS for file in _only_of(part, room)}
    for file in sorted((ROOMS / room).glob("*.py")):
        where = ", ".join(word for word, names in held.items() if file.name in names)
        where = where or of_feature.get(file.name, "features of a plan")
        yield f"| `{file.name}` | {_purpose(file)} | {where} |"


def _only_of(part: Part, room: str) -> frozenset[str]:
    """Return the files that a bundle has for one feature alone."""

    def files(without: Collection[str]) -> frozenset[str]:
        if room == "supervisor":
            return room_files(ROOMS / room, ("command",), without)
        names = re.findall(r" as (\w+)", (ROOMS / room / "__init__.py").read_text())
        return runtime_files(ROOMS / room, [f"from runtime import {', '.join(names)}"], (), without)

    return files(()) - files(ways_into([part], room))


def _purpose(file: Path) -> str:
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


# --------------------------------------------------------------------------- error codes


def errors_page(sites: Iterable[Site]) -> str:
    """Return docs/reference/errors.md."""
    lines = [
        "# Error codes",
        "",
        "Written by `python -m tools.reference`. The command line shows an error as",
        "`error[BX1203]: sentence`; a Python program reads `error.code`; `--json` prints it as",
        '`"code"`. Each place in the source that reports an error has a code of its own. Codes',
        "stay when sentences change. Where several places report one kind of fault, a letter",
        "follows the number: `error.family` is the code without it. Words in braces stand for what",
        "the error names. An option that the parser of options itself refuses has no code.",
    ]
    for package, found in _by_package(sites).items():
        lines += ["", f"## `{package}`", "", "| code | sentence | file |", "|---|---|---|"]
        lines += [f"| {each.code} | {_cell(_text(each))} | `{each.path}` |" for each in found]
    return "\n".join(lines) + "\n"


def _text(site: Site) -> str:
    """Return the sentence of a site; a rule's is made of its features."""
    sentences = {rule.code: rule.sentence(rule.when.name, rule.other.name) for rule in RULES}
    return sentences.get(site.code, site.text)


def _by_package(sites: Iterable[Site]) -> dict[str, list[Site]]:
    """Group sites by package, in the order of its first code."""
    found: dict[str, list[Site]] = {}
    for site in sites:
        first, _, rest = site.path.partition("/")
        package = rest.partition("/")[0] if first == "bigbrain_fx" else first
        found.setdefault(package, []).append(site)
    return found


def compatibility_page() -> str:
    """Return docs/reference/compatibility.md."""
    lines = [
        "# Compatibility: options that do not go together",
        "",
        "Written by `python -m tools.reference`, from the table that `split` refuses by",
        "(`bigbrain_fx/plan/compatibility/table.py`). All else goes together;",
        "[pairs](pairs.md) has every pair tried. Some cuts are refused once stages are known:",
        "[errors](errors.md).",
        "",
        "| this | does not go with | because | instead |",
        "|---|---|---|---|",
    ]
    for rule in RULES:
        instead = rule.instead if isinstance(rule.instead, str) else "what the error names"
        cells = rule.when.name, rule.other.name, rule.why or "not built yet", instead
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    main()
