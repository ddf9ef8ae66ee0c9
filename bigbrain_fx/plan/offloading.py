"""What lies in a device's store instead of its memory: asked for, refused, priced and said.

It knows stages, clusters and costs; it knows nothing of schedules, and moves no bytes.

Source: Rajbhandari et al., "ZeRO-Infinity" (2021), section 5.2, for the optimizer's state piece by
piece; here without its overlap with computing.
"""

from __future__ import annotations

import difflib
from dataclasses import replace

from bigbrain_fx.core import Cluster, Costs, Forecast, Offloaded, Stages
from bigbrain_fx.errors import InputError, NoPlanError

WORDS: tuple[Offloaded, ...] = ("state",)
NO_STORE = '{"name": "disk", "device": "NAME", "folder": "/scratch", "capacity": "64GiB", "bandwidth": "1GB/s"}'  # noqa: E501  # as it is pasted
_SAID = {"state": "what the optimizer keeps"}


def read_offload(text: str | None) -> tuple[Offloaded, ...]:
    """Read "state", or nothing.

    Raises:
        InputError: it has another word; names the nearest.
    """
    words = [] if text in (None, "none") else [word.strip() for word in str(text).split(",")]
    for word in words:
        if word not in WORDS:
            near = difflib.get_close_matches(word, WORDS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(
                f"there is no {word!r} to offload", at="--offload", help=f"{hint}write {_listed()}"
            )
    return tuple(word for word in WORDS if word in words)


def _listed() -> str:
    return " or ".join((*WORDS, "none"))


def require_stores(
    offload: tuple[Offloaded, ...], cluster: Cluster, *, trains: bool, groups: bool, zero_stage: int
) -> None:
    """Refuse what cannot be offloaded whatever the model is.

    Args:
        offload: what was asked for.
        cluster: where it runs.
        trains: whether there is a backward.
        groups: whether tensor groups were asked for.
        zero_stage: what replicas divide.

    Raises:
        InputError: says what does not go together, or which device has no store.
    """
    if not offload:
        return
    if not trains:
        raise InputError(
            "nothing is trained in inference: --offload is for training",
            at="--offload",
            help="leave --offload out",
        )
    if groups:
        raise InputError(
            "--offload does not go with tensor groups yet",
            at="--offload",
            help="leave --tensor out, or --offload",
        )
    if zero_stage == 3:
        raise InputError(
            "--offload does not go with --zero 3 yet",
            at="--offload",
            help="offload state with --zero 1 or 2, which divide it, too",
        )
    lacking = [device.name for device in cluster.devices if device.name not in cluster.store]
    if lacking:
        raise InputError(
            f"device {lacking[0]} has no store to offload to",
            at="--offload",
            help='name one for it in "stores" of the cluster file: '
            + NO_STORE.replace("NAME", lacking[0]),
        )


def offloading(stages: Stages, wanted: tuple[Offloaded, ...]) -> Stages:
    """Return stages whose devices keep these in their stores."""
    return replace(stages, offload=wanted) if wanted else stages


def as_planners_see(costs: Costs, wanted: tuple[Offloaded, ...]) -> Costs:
    """Return costs without what will lie in stores: of that one parameter's share is here at once.

    What moving it takes is in the optimizer's seconds.
    """
    if "state" not in wanted:
        return costs
    state, update = costs.optimizer_state_per_byte, costs.optimizer_s_per_byte
    moving = {d: s + both_ways_s(costs.cluster, d, state) for d, s in update.items()}
    return replace(
        costs,
        optimizer_s_per_byte=moving,
        optimizer_state_per_byte=0.0,
        optimizer_temporaries=costs.optimizer_temporaries + state,
        alone=None if costs.alone is None else as_planners_see(costs.alone, wanted),
    )


def both_ways_s(cluster: Cluster, device: str, nbytes: float) -> float:
    """Seconds to read so many bytes from a device's store and to write them back."""
    return 2 * nbytes / cluster.store[device].bytes_per_s


def require_capacity(forecast: Forecast, cluster: Cluster) -> None:
    """Refuse a plan whose stores are too small.

    Raises:
        NoPlanError: what every store would hold, and what it takes.
    """
    used = [entry for entry in forecast.devices if entry.stored_bytes]
    small = [e for e in used if e.stored_bytes > cluster.store[e.device].capacity_bytes]
    if not small:
        return
    names = ", ".join(f"{cluster.store[e.device].name} of {e.device}" for e in small)
    notes = [
        f"store {cluster.store[e.device].name} of {e.device} would hold {_mib(e.stored_bytes)} and "
        f"takes {_mib(cluster.store[e.device].capacity_bytes)}"
        for e in used
    ]
    raise NoPlanError(
        f"the plan does not fit: the store {names} is too small",
        notes=tuple(notes),
        help='give it more "capacity" in the cluster file, use more devices, or leave --offload '
        "out",
    )


def offload_text(stages: Stages, forecast: Forecast, cluster: Cluster) -> str:
    """Say what lies where, and what moving it takes of a step; nothing, where nothing does."""
    each = [
        f"{_mib(e.stored_bytes)} of {e.device} in {cluster.store[e.device].name} "
        f"({_moved_s(cluster, e.device, e.stored_bytes)} a step)"
        for e in forecast.devices
        if e.stored_bytes
    ]
    what = " and ".join(_SAID[word] for word in stages.offload)
    return f"offload: {what} lies in stores: {', '.join(each)}" if each else ""


def _moved_s(cluster: Cluster, device: str, nbytes: int) -> str:
    return f"{both_ways_s(cluster, device, nbytes):.4f} s to read and write"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
