"""Every pair of features of a bundle: bitwise, or refused before anything is written.

    from tools.conformance.pairs import pairs
    pairs()[0].words

It holds what is asked for and what must become of it; `judge` runs a pair, `__main__` prints them.
"""

from tools.conformance.pairs.features import FEATURES, Feature, Pair, pairs
from tools.conformance.pairs.judge import Outcome, judge

__all__ = ["FEATURES", "Feature", "Outcome", "Pair", "judge", "pairs"]
