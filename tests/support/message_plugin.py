"""The pytest side of `tests.support.messages`: which test runs, what became of it, what is stale.

With pytest-xdist each worker sends what its tests asserted to the process that started them, which
judges the snapshots. Only tests that ran to their end are judged, so that a part of the tests may
run alone; of files that were collected whole, a test that is gone is found, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import UPDATE, Entry, Recorder, read, recorder, write

_SENT = "messages"


class MessagesPlugin:
    """Collect what tests assert, and judge the snapshots at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.is_worker = hasattr(config, "workerinput")
        self.collected: set[str] = set()
        self.passed: set[str] = set()
        self.is_whole = True  # no worker was lost
        self.lines: list[str] = []

    @property
    def recorder(self) -> Recorder:
        """Return what this process's tests write into."""
        return recorder

    @pytest.hookimpl(tryfirst=True)  # before any is deselected
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note which tests there are."""
        self.collected |= {item.nodeid for item in items}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note which test runs, and where its temporary files are, which messages name."""
        recorder.test = item.nodeid
        own = self.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        recorder.folders = (own, own.parent) if self.is_worker else (own,)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note which tests ran to their end."""
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker sends."""
        sent = getattr(node, "workeroutput", {}).get(_SENT)
        if sent is None:
            self.is_whole = False
            return
        recorder.asserted |= {Entry(*each) for each in sent["asserted"]}
        self.collected |= set(sent["collected"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send, in a worker; else judge the snapshots, or write them."""
        if self.is_worker:
            asserted = [list(entry) for entry in sorted(recorder.asserted)]
            sent = {"asserted": asserted, "collected": sorted(self.collected)}
            self.config.workeroutput[_SENT] = sent  # type: ignore[attr-defined]  # of xdist
        elif not self.is_whole:
            self.lines.append("snapshots were not judged: a worker was lost")
        elif recorder.updates:
            self.lines += self._written()
        elif stale := sorted(self._stale()):
            self.lines += [f"{why}: {entry.code} {_where(entry)}" for entry, why in stale]
            self.lines.append(f"pytest {UPDATE}, of these tests, takes them out")
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was found."""
        if self.lines:
            terminalreporter.section("messages")
            terminalreporter.write_line("\n".join(self.lines))

    def _written(self) -> Iterator[str]:
        """Write the snapshots of the packages whose tests ran."""
        stale = {entry for entry, _ in self._stale()}
        asserted = defaultdict(set)
        for entry in recorder.asserted:
            asserted[entry.package].add(entry)
        for package in sorted({*asserted, *(entry.package for entry in stale)}):
            before = read(recorder.root, package)
            after = (before - stale) | asserted[package]
            if after != before:
                write(recorder.root, package, after)
                yield f"{package}: {len(after - before)} added, {len(before - after)} removed"

    def _stale(self) -> Iterator[tuple[Entry, str]]:
        """Yield entries that no test asserts any more, and why."""
        for package in sorted(self._packages()):
            for entry in read(recorder.root, package) - recorder.asserted:
                test = f"{package}/{entry.test}"
                if test in self.passed:
                    yield entry, "is asserted no more"
                elif self._is_gone(test):
                    yield entry, "has no test any more"

    def _packages(self) -> set[str]:
        """Return the packages that tests were collected from."""
        return {"/".join(test.split("/")[:2]) for test in self.collected}

    def _is_gone(self, test: str) -> bool:
        """Whether there is no such test: its file is gone, or was collected whole without it."""
        path = recorder.root / test.partition("::")[0]
        if not path.exists():
            return True
        return test not in self.collected and self._is_collected_whole(path)

    def _is_collected_whole(self, path: Path) -> bool:
        has_some = any(recorder.root / each.partition("::")[0] == path for each in self.collected)
        given = [self.config.invocation_params.dir / each for each in self.config.args]
        whole = (each for each in given if "::" not in each.name)
        return has_some and any(path.is_relative_to(each) for each in whole)


def _where(entry: Entry) -> str:
    return f"of {entry.package}/{entry.test}"
