"""The user's own training loop in plain PyTorch beside the bundle, step by step.

    plain PyTorch = captured graph = one-process reference = bundle

Plain PyTorch is the user's own training loop: a fresh model, its hooks, its optimizer. It runs in a
fork made before the model file was run; so does the bundle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigbrain_fx.core import door

if TYPE_CHECKING:
    from bigbrain_fx.verification.rehearsal import Waiting as Waiting, rehearsed as rehearsed
else:
    __getattr__ = door(__name__)
