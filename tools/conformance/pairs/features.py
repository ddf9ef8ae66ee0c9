"""Features of a bundle, each with what asks for it; pairs of them.

It knows words of the command line and lines of a model file; it runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Feature:
    """A feature that a pair may have.

    Attributes:
        letter: its name in the table; `title` says what it is.
        words: options of `split`, each with its value.
        lines: what a model file says besides.
        times: so many times the devices of a pipeline.
        later: it is asked for when the bundle is there: a kill, other devices, a lost one.
    """

    letter: str
    title: str
    words: Mapping[str, str]
    lines: str = ""
    times: int = 1
    later: bool = False


def _replicas(**more: str) -> dict[str, str]:
    return {"replicas": "2", "sum-order": "micro", **more}


FEATURES = (
    Feature("R", "two replicas, sums by micro-batch", _replicas(), times=2),
    Feature("Z1", "ZeRO 1", _replicas(zero="1"), times=2),
    Feature("Z2", "ZeRO 2", _replicas(zero="2"), times=2),
    Feature("Z3", "ZeRO 3", _replicas(zero="3"), times=2),
    Feature("T", "a tensor group of two", {"tensor": "2"}, times=2),
    Feature("S", "split backward (zb-h1)", {"schedule": "zb-h1"}),
    Feature("Vi", "virtual stages (interleaved)", {"schedule": "interleaved"}),
    Feature("Vz", "V placement (zb-v)", {"schedule": "zb-v"}),
    Feature("Cw", "recompute of whole stages", {"recompute": "all"}),
    Feature("Co", "recompute of ops", {"recompute": "ops"}),
    Feature("Oa", "activations in stores", {"offload": "activations"}),
    Feature("Os", "the optimizer's state in stores", {"offload": "state"}),
    Feature("Ow", "weights in stores, layer by layer", {"offload": "weights"}),
    Feature("Ab", "asynchronous, 2bw", {"asynchronous": "2bw"}),
    Feature("As", "asynchronous, stash", {"asynchronous": "stash"}),
    Feature("G", "gems", {"schedule": "gems"}),
    Feature("M", "autocast in bfloat16", {}, 'autocast = "bfloat16"'),
    Feature("N", "clipping of the norm", {}, "clip_norm = 0.05"),
    Feature("P", "a device killed, and replaced", {}, later=True),
    Feature("Q", "resplit for one device less", {}, later=True),
    Feature("E", "a device lost for good (--elastic)", {}, later=True),
    Feature("I", "inference", {"mode": "eval"}),
)
TOGETHER: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("S", "Vi"): {"schedule": "interleaved", "defer": "all"},
    ("S", "Vz"): {"schedule": "zb-v", "defer": "all"},
    ("S", "G"): {"schedule": "gems", "defer": "all"},
    ("Oa", "Os"): {"offload": "activations,state"},
    ("Oa", "Ow"): {"offload": "activations,weights"},
    ("Os", "Ow"): {"offload": "state,weights"},
}
"""Pairs that one option asks for."""


@dataclass(frozen=True)
class Pair:
    """Two features, asked for at once."""

    first: Feature
    second: Feature

    @property
    def name(self) -> str:
        """Both letters."""
        return f"{self.first.letter}+{self.second.letter}"

    @property
    def options(self) -> dict[str, str]:
        """Options of `split`, by name."""
        key = self.first.letter, self.second.letter
        return {**self.first.words, **self.second.words, **TOGETHER.get(key, {})}

    @property
    def words(self) -> tuple[str, ...]:
        """The same as they are typed."""
        return tuple(word for name, value in self.options.items() for word in (f"--{name}", value))

    @property
    def lines(self) -> str:
        """Lines that the model file has besides."""
        return "\n".join(filter(None, (self.first.lines, self.second.lines)))

    @property
    def devices(self) -> int:
        """How many a pipeline of two stages takes then."""
        has = {self.first.letter[0], self.second.letter[0]}
        return 2 * (2 if has & {"R", "Z"} else 1) * (2 if "T" in has else 1)

    @property
    def later(self) -> str:
        """Event after the bundle is written, by its letter; or none."""
        return "".join(each.letter for each in (self.first, self.second) if each.later)


def pairs() -> tuple[Pair, ...]:
    """Return every pair that can be asked for."""
    return tuple(Pair(*two) for two in combinations(FEATURES, 2) if _can_be_asked_for(*two))


def one_of_a_kind() -> Iterator[str]:
    """Yield pairs that are two values of one option, or two things to do with a bundle."""
    for two in combinations(FEATURES, 2):
        if not _can_be_asked_for(*two):
            yield Pair(*two).name


def _can_be_asked_for(first: Feature, second: Feature) -> bool:
    if first.later and (second.later or second.letter == "I"):
        return False  # runs of inference are not supervised: there is nothing to go on from
    if (first.letter, second.letter) in TOGETHER:
        return True
    both = first.words.keys() & second.words.keys()
    return all(first.words[name] == second.words[name] for name in both)
