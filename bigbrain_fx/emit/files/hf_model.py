"""A Hugging Face configuration -> Python that builds its model, where stages call modules whole.

hf:config.json ─▶ CONFIG = {...}; def model(): ...     as a model file has it
"""

from __future__ import annotations

import json

from bigbrain_fx.emit.modules.layout import double_quoted, wrapped
from bigbrain_fx.frontend import hf_location
from bigbrain_fx.plan import Plan

_CLASSIFIES = "ForSequenceClassification"
_PADS = """
    if config.pad_token_id is None:
        config.pad_token_id = 0  # without padding each row ends at its last position"""


def hf_model_text(plan: Plan) -> str:
    """Return the text of a module whose `model()` builds the model of a plan's configuration.

    It builds as `split` did, and needs transformers; nothing is downloaded.
    """
    at, kind = hf_location(plan.source.path), plan.graph.name
    assert kind.isidentifier()
    fields = json.loads(at.path.read_text(encoding="utf-8"))
    constant = double_quoted("\n".join(wrapped(f"CONFIG = {fields!r}", 0)))
    dtype = f", dtype=torch.{at.dtype}" if at.dtype else ""
    return f'''\
import torch
import transformers

{constant}


def model() -> torch.nn.Module:
    """Build the model of CONFIG as transformers does, without a cache of keys and values."""
    config = transformers.CONFIG_MAPPING[CONFIG["model_type"]].from_dict(CONFIG)
    for part in (config, config.get_text_config()):
        if hasattr(part, "use_cache"):
            part.use_cache = False{_PADS if kind.endswith(_CLASSIFIES) else ""}
    return transformers.{kind}._from_config(config{dtype})
'''
