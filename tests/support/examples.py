"""How many examples hypothesis draws: all of them in the nightly tests, a third in the gate."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

GATE, NIGHTLY = "gate", "nightly"
FEWEST = 4
USUAL = 100  # hypothesis's own number


def register() -> None:
    """Register both profiles and load that of the gate; `--hypothesis-profile` loads another."""
    settings.register_profile(NIGHTLY, max_examples=USUAL)
    settings.register_profile(GATE, max_examples=_fewer(USUAL))
    settings.load_profile(GATE)


def examples(count: int) -> int:
    """Return the `max_examples` of a test that draws `count` examples under the nightly profile."""
    return _fewer(count) if settings.get_current_profile_name() == GATE else count


def quick(count: int) -> settings:
    """Draw so many examples, the same ones every time, however long one takes."""
    every = list(HealthCheck)
    drawn = examples(count)
    return settings(
        max_examples=drawn, deadline=None, derandomize=True, suppress_health_check=every
    )


def _fewer(count: int) -> int:
    return min(count, max(FEWEST, -(-count // 3)))
