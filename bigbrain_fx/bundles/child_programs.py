"""Programs that are run to their end, and what they have started with them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from bigbrain_fx.supervisor import Group

END_S = 10.0  # longest wait for a process that was killed


def run_group(
    words: Sequence[str],
    limit_s: float,
    output: int = subprocess.PIPE,
    errors: int | None = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run`; whatever it has started ends with it.

    Args:
        words: what to run.
        limit_s: after so long it is ended.
        output: takes what it writes.
        errors: takes its complaints; None: they go where this process's go.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as leader:
        group = Group(leader)
        try:
            said, complained = leader.communicate(timeout=limit_s)
        finally:
            group.kill()
            group.wait(END_S)
    return subprocess.CompletedProcess(words, leader.returncode, said, complained)
