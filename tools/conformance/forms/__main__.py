"""Forms of training code, each judged against a plain loop, as a table.

    python -m tools.conformance forms [NAME ...] [--family F] [--resume rows.jsonl] [--write PAGE]
    python -m tools.conformance forms --drawn SEED [--count 50]

Exit code 1 where a form is not what its file says: right, warned, opaque, refused or stopped.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from tools.conformance.coverage import warm
from tools.conformance.forms import Form, find, forms
from tools.conformance.forms.drawn import drawn
from tools.conformance.forms.judge import Outcome, judge

HEADING = "## Forms of training code"
STATUSES = ("right", "warned", "opaque", "refused", "stopped", "unseen")
_OPENING = """{heading}

Small model files as users write them (`tools/conformance/forms`), each split over two devices with
half of its parameters on each, and judged against an untouched training loop in plain PyTorch
(`tools/conformance/forms/loop.py`, which imports nothing of ours): losses and weights after {steps}
steps.

- **right**: every link of `verify` holds, none is left out, and the bundle trains as the loop does;
  where `split` names gradients that are added in sixteen bits, to their rounding
- **warned**: the same, and `split` warns that these micro-batches train something else than the
  whole batch would, as the loop's micro-batches do
- **opaque**: the same with the whole step on one device, since no trace holds it; `split` warns
- **refused**: `split` writes nothing, names what it is and what to do
- **stopped**: `split` cannot see it; `verify` and every run stop before the step, with what to do
- **unseen**: the loop itself gives other losses in each process; `verify` says that, no more

What is opaque, refused or stopped names a form that follows the advice; that form is right, or
right with one micro-batch.
{summary} By family (`tools/conformance/forms/FAMILY.txt` has the code of each):

{families}

| form | what it is | outcome | remedy that was tried |
|---|---|---|---|
"""


@click.command()
@click.argument("names", nargs=-1)
@click.option("--family", "families", multiple=True, help="This family only.")
@click.option("--resume", type=click.Path(path_type=Path), help="Skip its forms; add to it.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the table of all forms here.")
@click.option("--drawn", "seed", type=int, help="Draw forms and options of `split` by this seed.")
@click.option("--count", default=50, show_default=True, help="How many, with --drawn.")
def main(
    names: tuple[str, ...],
    families: tuple[str, ...],
    resume: Path | None,
    write: Path | None,
    seed: int | None,
    count: int,
) -> None:
    """Judge the forms, or those named, or those drawn."""
    _with_one_thread()
    if seed is not None:
        _judge_drawn(seed, count)
    known = _former(resume)
    wanted = [find(name) for name in names] or [
        form for form in forms() if not families or form.family in families
    ]
    if any(form.name not in known for form in wanted):
        warm()
    found = [_said(form, known.get(form.name) or _judged(form, resume)) for form in wanted]
    click.echo(summary(found))
    if write is not None:
        write.write_text(section(write.read_text() if write.exists() else "", found))
    sys.exit(any(outcome.status != form.expected for form, outcome in found))


def _with_one_thread() -> None:
    """Begin anew where OpenMP has several: a fork's own threads would have other bits than it."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        words = [sys.executable, "-m", "tools.conformance.forms", *sys.argv[1:]]
        os.execve(
            sys.executable, words, {**os.environ, "OMP_NUM_THREADS": "1", "BIGBRAIN_NO_CACHE": "1"}
        )


def _judge_drawn(seed: int, count: int) -> None:
    """Judge forms under options; say which are neither right nor opaque nor refused."""
    warm()
    found = [_said(form, judge(form)) for form in drawn(seed, count)]
    click.echo(summary(found))
    wrong = [form for form, outcome in found if not _is_answered(outcome)]
    for form in wrong:
        click.echo(f"{form.name}: {form.title}")
    sys.exit(bool(wrong))


def _is_answered(outcome: Outcome) -> bool:
    return outcome.status in ("right", "warned", "opaque", "refused")


def _former(path: Path | None) -> dict[str, Outcome]:
    if path is None or not path.is_file():
        return {}
    lines = path.read_text().splitlines()
    return {row.form: row for row in (Outcome(**json.loads(line)) for line in lines)}


def _judged(form: Form, path: Path | None) -> Outcome:
    outcome = judge(form)
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
    return outcome


def _said(form: Form, outcome: Outcome) -> tuple[Form, Outcome]:
    mark = "" if outcome.status in form.expected.split(" or ") else f"  (expected: {form.expected})"
    first = (outcome.detail.splitlines() or [""])[0]
    seconds = f"{outcome.seconds:5.1f} s"
    click.echo(f"{form.name:28} {outcome.status:8} {seconds}  {first[:110]}{mark}")
    return form, outcome


def summary(found: Sequence[tuple[Form, Outcome]]) -> str:
    """Say how many forms do what."""
    counts = Counter(outcome.status for _, outcome in found)
    parts = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    return f"{len(found)} forms: {parts}."


def by_family(found: Sequence[tuple[Form, Outcome]]) -> str:
    """Return a table of how many forms of each family do what."""
    counts = Counter((form.family, outcome.status) for form, outcome in found)
    heads = [status for status in STATUSES if any(key[1] == status for key in counts)]
    head = f"| family | {' | '.join(f'`{head}`' for head in heads)} |"
    rows = (
        f"| {family} | {' | '.join(str(counts[family, head]) for head in heads)} |"
        for family in dict.fromkeys(form.family for form, _ in found)
    )
    return "\n".join((head, "|---|" + "---:|" * len(heads), *rows))


def section(text: str, found: Sequence[tuple[Form, Outcome]]) -> str:
    """Put the table into a page, in the place of its former one."""
    from tools.conformance.forms.loop import STEPS

    opening = _OPENING.format(
        heading=HEADING, steps=STEPS, summary=summary(found), families=by_family(found)
    )
    before, _, rest = text.partition(HEADING)
    _, mark, after = rest.partition("\n## ")
    page = before or "# Supported training code\n\nWritten by `make coverage`.\n\n"
    rows = "\n".join(_rows(found))
    return f"{page}{opening}{rows}\n" + (f"{mark}{after}" if mark else "")


def _rows(found: Sequence[tuple[Form, Outcome]]) -> Iterator[str]:
    for form, outcome in found:
        title = form.title.replace("|", "\\|")
        yield f"| {form.name} | {title} | {outcome.status} | {form.remedy} |"


if __name__ == "__main__":
    main()
