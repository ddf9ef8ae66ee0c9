"""Product lines by the tests that run them: what nothing covers, which tests add nothing.

    python -m tools.line_coverage run FOLDER -- -n 2 -m "not nightly"     pytest, recorded
    python -m tools.line_coverage report FOLDER                           percent by package, and
    python -m tools.line_coverage report FOLDER --uncovered               the lines of each file
    python -m tools.line_coverage report FOLDER --redundant               tests that add no line

A process that a test starts is recorded under that test, and so is a bundle's copy of the runtime.
Recording takes about twice as long as the tests do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from coverage import Coverage, CoverageData

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("bigbrain_fx", "partitioners", "estimators")
_CONFIG = """\
[run]
data_file = {folder}/data
parallel = true
patch = subprocess, _exit, fork
context = ${{PYTEST_CURRENT_TEST-none}}
include =
{include}
    /tmp/*/runtime/*.py
    /tmp/*/supervisor/*.py
disable_warnings = no-data-collected, module-not-measured, couldnt-parse
[paths]
runtime =
    {root}/bigbrain_fx/runtime
    /tmp/*/runtime
supervisor =
    {root}/bigbrain_fx/supervisor
    /tmp/*/supervisor
[report]
exclude_also =
    if TYPE_CHECKING:
    @overload
    class .*\\(Protocol\\):
"""

Line = tuple[str, int]
_NO_TEST = "none"  # of what runs before the tests


@dataclass(frozen=True)
class Recorded:
    """Lines by test, and all lines that could be run.

    Attributes:
        of_test: node id -> lines; a test's phases and its processes together.
        statements: every line of the product that is a statement.
    """

    of_test: Mapping[str, frozenset[Line]]
    statements: frozenset[Line]

    @property
    def covered(self) -> frozenset[Line]:
        """Lines that some test runs, or an import."""
        return self.statements & frozenset[Line]().union(*self.of_test.values())


@click.group()
def main() -> None:
    """Record and report which tests run which lines."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def run(folder: Path, options: tuple[str, ...]) -> None:
    """Run pytest with OPTIONS and record its lines in FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder.resolve() / "config"
    config.write_text(config_text(folder.resolve()))
    words = ["--benchmark-disable", "--cov", f"--cov-config={config}", "--cov-context=test"]
    command = [sys.executable, "-m", "pytest", "-q", *words, "--cov-report=", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    sys.exit(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode)


def config_text(folder: Path) -> str:
    """Return the configuration of a run that is recorded in a folder."""
    include = "\n".join(f"    {ROOT}/{package}/*" for package in PACKAGES)
    return _CONFIG.format(folder=folder, include=include, root=ROOT)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--uncovered", is_flag=True, help="List the lines that no test runs.")
@click.option("--redundant", is_flag=True, help="List the tests that add no line to the others.")
def report(folder: Path, uncovered: bool, redundant: bool) -> None:
    """Say how many lines are covered, by package."""
    found = read(folder)
    if uncovered:
        _echo(uncovered_lines(found))
    elif redundant:
        _echo(redundant_tests(found.of_test))
    else:
        _echo(by_package(found))


def _echo(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)


def read(folder: Path) -> Recorded:
    """Read what `run` recorded; all processes' data are combined first.

    Raises:
        click.ClickException: nothing was recorded there.
    """
    cover = Coverage(data_file=str(folder / "data"), config_file=str(folder / "config"))
    parts = [*folder.glob("data.*")]
    if parts:
        cover.combine([str(part) for part in parts], keep=False)
        cover.save()
    cover.load()
    data = cover.get_data()
    if not data.measured_files():
        raise click.ClickException(f"{folder} has no recorded lines: run the tests first")
    return Recorded(_lines_of_tests(data), frozenset(_statements(cover)))


def _lines_of_tests(data: CoverageData) -> dict[str, frozenset[Line]]:
    found: dict[str, set[Line]] = defaultdict(set)
    for file in data.measured_files():
        name = _name(file)
        for line, contexts in data.contexts_by_lineno(file).items():
            for test in {node_of(context) for context in contexts}:
                found[test].add((name, line))
    return {test: frozenset(lines) for test, lines in found.items()}


def node_of(context: str) -> str:
    """Return the node id of a context: "none|node|run" of pytest, "node (call)" of a process."""
    own = context.removeprefix(f"{_NO_TEST}|").partition("|")[0]
    return own.rpartition(" (")[0] if own.endswith(")") else own or _NO_TEST


def _name(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else file


def _statements(cover: Coverage) -> Iterator[Line]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            lines = cover.analysis2(str(path))[1]
            yield from ((_name(str(path)), line) for line in lines)


# --------------------------------------------------------------------------- reports


def by_package(found: Recorded) -> Iterator[str]:
    """Yield the covered share of each package's statements, and of all."""
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in found.statements:
        parts = Path(line[0]).parts
        groups["/".join(parts[: 2 if len(parts) > 2 else 1])].append(line)
    covered = found.covered
    for name, lines in sorted(groups.items()):
        yield _share(name, sum(line in covered for line in lines), len(lines))
    yield _share("all", len(covered), len(found.statements))


def _share(name: str, count: int, total: int) -> str:
    return f"{name:<32}{count:>8} of {total:>6}  {100 * count / max(1, total):5.1f} %"


def uncovered_lines(found: Recorded) -> Iterator[str]:
    """Yield a line a file: the statements that nothing runs, as ranges."""
    left: dict[str, list[int]] = defaultdict(list)
    for name, line in sorted(found.statements - found.covered):
        left[name].append(line)
    for name, lines in sorted(left.items(), key=lambda pair: -len(pair[1])):
        yield f"{name}: {', '.join(ranges(lines))}"


def ranges(lines: Iterable[int]) -> Iterator[str]:
    """Yield runs of numbers: 3, 4, 5, 9 -> 3-5, 9."""
    first = last = None
    for line in lines:
        if last is not None and line != last + 1:
            yield _range(first, last)
            first = line
        first, last = line if first is None else first, line
    if last is not None:
        yield _range(first, last)


def _range(first: int | None, last: int) -> str:
    return f"{last}" if first == last else f"{first}-{last}"


def redundant_tests(of_test: Mapping[str, frozenset[Line]]) -> Iterator[str]:
    """Yield the tests whose lines the others run, those with the fewest lines first.

    Each is judged without those before it, so all of them together add no line.
    """
    count: dict[Line, int] = defaultdict(int)
    for lines in of_test.values():
        for line in lines:
            count[line] += 1
    for test, lines in sorted(of_test.items(), key=lambda pair: (len(pair[1]), pair[0])):
        if test != _NO_TEST and all(count[line] > 1 for line in lines):
            for line in lines:
                count[line] -= 1
            yield f"{len(lines):6d}  {test}"


if __name__ == "__main__":
    main()
