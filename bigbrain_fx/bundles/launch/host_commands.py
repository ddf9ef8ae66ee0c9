"""The hosts that a plan needs, and what to type on each of them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from bigbrain_fx.bundles.launch.options import DEFAULT_STEPS, RunOptions
from bigbrain_fx.bundles.launch.program import entry, transport_of
from bigbrain_fx.bundles.launch.supervised import require_extra, require_not_nccl
from bigbrain_fx.core import words
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan
from bigbrain_fx.supervisor import how_to_make

_SUPERVISED = words("restarts hang_s grace_s snapshot_every snapshots log_mib events")
_TRAINING = words("steps seed deadline_s on_nan store save commits commit_every keep")
SECRET = "secret"  # the file that all hosts have, in the bundle


def hosts(plan: Plan) -> tuple[str, ...]:
    """Return the hosts that a plan needs, in order of rank."""
    return tuple(dict.fromkeys(plan.cluster.device[name].host for name in plan.stages.devices))


def commands(plan: Plan, options: RunOptions, bundle: Path | None = None) -> list[tuple[str, str]]:
    """Return (host, command): the command to type on each host, for a bundle copied to all.

    If processes are to be replaced, one command a host; else one for every device. The first host
    answers at the port, 29500 unless the options name one.

    Raises:
        InputError: processes are to be replaced, and the messages go over nccl, or `bundle` lacks
            files for that over several hosts; or `suspect`.
    """
    if options.suspect:
        raise InputError(
            "--suspect is for a run on one host, and this plan has several",
            code="BX3052",
            help="leave it out, or add --local to run all of it here",
        )
    if options.spares is not None:
        require_not_nccl(plan, options.backend)
        if bundle is not None:
            require_extra(bundle, "hosts", "replacing processes over several hosts")
        return _launches(plan, options)
    names = [plan.cluster.device[name].host for name in plan.stages.devices]
    total = options.steps or (None if options.inputs else DEFAULT_STEPS)
    given = replace(options, steps=total).flags(*words("steps seed deadline_s save inputs outputs"))
    given += transport_of(options)
    common = (
        f"WORLD_SIZE={len(names)} MASTER_ADDR={shlex.quote(names[0])} "
        f"MASTER_PORT={options.port or 29500} python {entry(plan)} {shlex.join(given)}"
    )
    return [
        (host, f"RANK={rank} LOCAL_RANK={names[:rank].count(host)} {common}")
        for rank, host in enumerate(names)
    ]


def secret_command() -> str:
    """Return what makes the certificate and key that supervisors of several hosts share."""
    return how_to_make(SECRET)


def _launches(plan: Plan, options: RunOptions) -> list[tuple[str, str]]:
    """Return a supervisor's command for the first host, and an agent's for each other."""
    first, *others = hosts(plan)
    address = shlex.quote(f"{first}:{options.port or 29500}")
    common = f"--secret {SECRET} --spares {options.spares}"  # earlier name, of older bundles, too
    given = replace(options, steps=options.steps or DEFAULT_STEPS).flags(*_SUPERVISED, *_TRAINING)
    given += ["--resume"] if options.resume else []
    head = f"python launch.py --listen {address} {common} {shlex.join(given)}"
    return [(first, head)] + [
        (host, f"python launch.py --join {address} --host {shlex.quote(host)} {common}")
        for host in others
    ]
