"""The options of launch.py in bundles that watch, check, span hosts or have replicas.

Bundles without have `arguments` alone, which names what each of these options needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import KINDS, Flag, add_flags, number, require_parts

if TYPE_CHECKING:
    from .multi_host import Head

MOST_SECONDS = 1e8
MIB = 2**20
KINDS["seconds"] = number("seconds", float, lambda n: 0 < n < MOST_SECONDS, "more than 0 seconds")
KINDS["share"] = number("share", float, lambda n: 0 <= n <= 1, "a share from 0 to 1")
MORE_FLAGS = (
    Flag(
        "--hang",
        "hang_s",
        "seconds",
        "end a process that makes no progress, and give up a host that says nothing, for so many "
        "seconds; time in which a busy host gave it no processor does not count",
        60.0,
    ),
    Flag(
        "--grace",
        "grace_s",
        "seconds",
        "when asked to stop, wait so many seconds for the end of a step and the last checkpoint",
        default="3 times the longest recent step, at least --hang and 30",
    ),
    Flag(
        "--suspect",
        "suspect",
        "share",
        "let a standby worker recompute this fraction of all devices' steps, and go back where "
        "results differ (silent data corruption)",
        0.0,
    ),
    Flag(
        "--log-mib",
        "log_mib",
        "count",
        "memory for sent messages on each device",
        default="a share of half of what is free",
    ),
)


def add_more(parser: argparse.ArgumentParser) -> None:
    """Add these options, and how several hosts find each other."""
    add_flags(parser, MORE_FLAGS)
    parser.add_argument(
        "--listen", help="[ADDRESS:]PORT for the agents of the other hosts (default: loopback)"
    )
    parser.add_argument("--join", help="ADDRESS:PORT of the first host: be the agent of this one")
    parser.add_argument("--host", help="this host's name in the plan, with --join")
    parser.add_argument(
        "--secret", help="a certificate and its key; all hosts have this file, only you can read it"
    )


def require_more(
    parser: argparse.ArgumentParser, options: argparse.Namespace, hosts: Sequence[str]
) -> None:
    """Refuse what this bundle has no files for, or no supervisor of another host be found by."""
    if options.suspect and (hosts or not options.spares):
        parser.error("--suspect needs --standby 1 or more, and all devices on one host")
    if (options.listen or options.join) and not hosts:
        parser.error("--listen and --join are for plans with several hosts")
    given = {flag.name for flag in MORE_FLAGS if getattr(options, flag.field) != flag.value}
    given |= {f"--{name}" for name in ("listen", "join") if getattr(options, name)}
    require_parts(parser, given)
    if options.listen or options.join:
        from .multi_host import require_hosts  # only bundles of --with hosts have it

        require_hosts(parser, options, hosts)


def more_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what these options say of a job."""
    return {
        "hang_s": options.hang_s,
        "suspect": options.suspect,
        "log_bytes": None if options.log_mib is None else options.log_mib * MIB,
        "grace_s": options.grace_s,
    }


def head_of(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    environment: Mapping[str, str],
    logs: Path,
    folder: Path,
    where: Sequence[tuple[str, str]],
) -> Head | None:
    """Return this host's end of a run on several; None: there is one host. See `head_or_agent`."""
    if not (options.listen or options.join):
        return None
    from .multi_host import head_or_agent  # only bundles of --with hosts have it

    return head_or_agent(parser, options, environment, logs, folder, where)
