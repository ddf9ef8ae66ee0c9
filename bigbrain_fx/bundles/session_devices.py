"""Devices that a session cannot have: refused before any capture."""

from __future__ import annotations

from collections.abc import Sequence

from bigbrain_fx.bundles.launch import Backend
from bigbrain_fx.core import Device
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options


def require_session(
    devices: Sequence[Device], options: Options | None = None, backend: Backend | None = None
) -> None:
    """Refuse what a session cannot start and replace from this process, before any capture."""
    if options is not None and options.wants_groups:
        raise InputError(
            "a session's devices compute by themselves, not in groups",
            code="BX3142",
            help="leave tensor out of the options, or split a model file, and run the bundle",
        )
    if options is not None and options.all_reduce_order == "backend":
        raise InputError(
            "a session replaces processes, which torch's collectives do not allow",
            code="BX3143",
            help="use another sum_order, or split a model file, and run the bundle",
        )
    if backend != "gloo" and all(device.kind == "cuda" for device in devices):
        raise InputError(
            "all its devices are GPUs, whose messages go over nccl, and a session "
            "replaces processes, which nccl does not allow",
            code="BX3144",
            help='give run=RunOptions(backend="gloo"): messages go through host memory then; or '
            "split a model file, and `bigbrain-fx run` the bundle: it trains there over nccl, "
            "without replacement",
        )
    used = tuple(dict.fromkeys(device.host for device in devices))
    if len(used) > 1:
        raise InputError(
            f"these are devices of {len(used)} hosts ({', '.join(used)}), and a session "
            "starts all processes on this one",
            code="BX3145",
            help="give a cluster of this host's devices; or split a model file, and `bigbrain-fx "
            "run` prints what to type on each host",
        )
