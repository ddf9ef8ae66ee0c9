"""Another revision of the repository plans the same cases, in a working tree of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.plan_digest.hashing import ROOT, Digest
from tools.plan_digest.tables import read_table

TOOL = Path("tools") / "plan_digest"
PRODUCT = Path("bigbrain_fx")
LIMIT_S = 3600.0


class RevisionError(Exception):
    """A revision is not there, or plans nothing; says so in one sentence."""


def digests_of(revision: str, models: Sequence[str], processes: int) -> Mapping[str, Digest]:
    """Return the digests of a revision's plans.

    A revision from before this tool is run with today's copy of it.

    Raises:
        RevisionError: git has no such revision, or the revision does not run.
    """
    with _checked_out(revision) as tree:
        _require_own_code(tree, revision)
        table = tree / "digests.json"
        words = ["-m", "tools.plan_digest", "--json", str(table), "-j", str(processes)]
        ran = _run([sys.executable, *words, "--models", ";".join(models)], tree)
        if ran.returncode or not table.is_file():
            last = (ran.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise RevisionError(f"revision {revision} does not run: {last}")
        return read_table(table)


def _require_own_code(tree: Path, revision: str) -> None:
    """Put today's tool where there is none; refuse a tree whose code Python would find elsewhere.

    The environment has a checkout on its path, which answers for any package that the tree lacks.
    """
    if not (tree / TOOL).is_dir() and (tree / "tools").is_dir():
        shutil.copytree(ROOT / TOOL, tree / TOOL)
    for package in (PRODUCT, TOOL.parent):
        if not (tree / package / "__init__.py").is_file():
            raise RevisionError(f"revision {revision} does not run: it has no package {package}")


@contextmanager
def _checked_out(revision: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="plan-digest-") as folder:
        tree = Path(folder) / "tree"
        added = _run(["git", "worktree", "add", "--detach", str(tree), revision], ROOT)
        if added.returncode:
            raise RevisionError(f"git has no revision {revision}")
        try:
            yield tree
        finally:
            _run(["git", "worktree", "remove", "--force", str(tree)], ROOT)


def _run(words: Sequence[str], where: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(where)}
    return subprocess.run(
        words, cwd=where, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
