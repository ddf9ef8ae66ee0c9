"""Every pair of features of a bundle: bitwise, or refused before anything is written.

    from tools.pairs import pairs
    pairs()[0].words

It holds what is asked for and what must become of it; `judge` runs a pair, `__main__` prints them.
"""

from tools.pairs.features import FEATURES, Feature, Pair, pairs
from tools.pairs.judge import Outcome, judge

__all__ = ["FEATURES", "Feature", "Outcome", "Pair", "judge", "pairs"]
