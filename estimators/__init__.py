"""The table of estimators: who says what an op costs on a device. One method per file.

To add one: write a class with `name` and `estimate` (`bigbrain_fx.core.Estimator`), list it here
and in pyproject.toml; `tests/contract/test_estimators.py` then tests it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .analytical import Analytical
from .compiled import Compiled
from .layers import Layers
from .learned import Learned
from .measured import Measured

TABLE: Mapping[str, Callable[..., object]] = {
    Analytical.name: Analytical,
    Compiled.name: Compiled,
    Layers.name: Layers,
    Learned.name: Learned,
    Measured.name: Measured,
}
"""Every method by its name; the registry checks that what it makes keeps the protocol."""
