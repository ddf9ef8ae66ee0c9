"""The table of partitioners: who decides which op runs where. One method per file.

To add one: write a class with `name` and `partition` (`bigbrain_fx.core.Partitioner`), list it here
and in pyproject.toml; `tests/contract/test_partitioners.py` then tests it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .chain_dp import ChainDP
from .m_etf import METF
from .m_sct import MSCT
from .m_topo import MTopo
from .naive import Naive
from .scattered import Scattered

TABLE: Mapping[str, Callable[..., object]] = {
    Naive.name: Naive,
    ChainDP.name: ChainDP,
    MTopo.name: MTopo,
    METF.name: METF,
    MSCT.name: MSCT,
    Scattered.name: Scattered,
}
"""Every method by its name; the registry checks that what it makes keeps the protocol."""

PRESETS: Mapping[str, tuple[str, str]] = {
    "auto": ("auto", "analytical"),
    "naive": ("naive", "analytical"),
    "analytical": ("chain-dp", "analytical"),
    "learned": ("chain-dp", "learned"),
    "measured": ("chain-dp", "measured"),
    "m-sct": ("m-sct", "analytical"),
    "scattered": ("scattered", "analytical"),
}
"""What the command line offers: a partitioner with an estimator."""
