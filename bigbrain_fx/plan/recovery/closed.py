"""The share of time that is training, in closed form.

Failures come at random (exponential times), also while recovering; then recovery starts over.
"""

from __future__ import annotations

from math import exp, expm1

from bigbrain_fx.plan.recovery.choice import Recovery


def closed_form(recovery: Recovery, mtbf_s: float) -> float:
    """Return useful seconds per second, for replay: useful is a step without any overhead.

    Process deaths: up for 1/r on average, then a recovery of R must pass undisturbed, which takes
    (exp(r R) - 1) / r; so exp(-r R) of the time is up. R is uniform between re-forming alone and
    re-forming with the longest replay, as a death falls anywhere between two snapshots. Hosts:
    Daly's complete model, for segments from commit to commit.
    """
    rate, host_share = 1 / mtbf_s, _host_share(recovery)
    within = _processes(recovery, rate * (1 - host_share)) / (1 + recovery.overhead)
    if not host_share:
        return within
    assert recovery.commit_every is not None
    segment_s = recovery.commit_every * recovery.step_s
    return _segments(segment_s, segment_s / within, rate * host_share, recovery.assumptions.cold_s)


def restart_all(recovery: Recovery, mtbf_s: float, restart_s: float, every_s: float) -> float:
    """Return the same for restarting all processes from a commit made every `every_s` seconds."""
    return _segments(every_s, every_s + recovery.commit_s, 1 / mtbf_s, restart_s)


def _host_share(recovery: Recovery) -> float:
    return recovery.assumptions.host_share if recovery.commit_every else 0.0


def _processes(recovery: Recovery, rate: float) -> float:
    """Return the share of time that no process is being recovered; each dies as often."""
    reform_s, count = recovery.assumptions.reform_s, len(recovery.devices)
    mean = sum(_mean_exp(rate, reform_s + d.snapshot_s, d.replay_s) for d in recovery.devices)
    return count / mean


def _mean_exp(rate: float, fixed_s: float, replay_s: float) -> float:
    """Return E[exp(rate * R)] for R = fixed + uniform(0, replay)."""
    span = rate * replay_s
    return exp(rate * fixed_s) * (expm1(span) / span if span > 1e-12 else 1.0)


def _segments(useful_s: float, segment_s: float, rate: float, restart_s: float) -> float:
    """Return useful / expected time of a segment that is done again after each failure.

    Daly, A higher order estimate of the optimum checkpoint interval (2006), equation 20 less the
    last segment's end: exp(rate R) * (exp(rate T) - 1) / rate.
    """
    if rate * segment_s > 700:  # nothing will ever be finished
        return 0.0
    return useful_s * rate / (exp(rate * restart_s) * expm1(rate * segment_s))
