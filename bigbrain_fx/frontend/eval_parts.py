"""Parts of a model that its maker put into eval mode, and that training puts back: frozen norms.

model = Net(); model.norm.eval()    ─▶    model.train()    ─▶    model.norm trains
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from bigbrain_fx.frontend.tracing.step import modes_kept

_SAID = 3  # names in a sentence
_MODES = (
    nn.modules.batchnorm._NormBase,
    nn.modules.dropout._DropoutNd,
    nn.RNNBase,
    nn.MultiheadAttention,
)


def eval_parts_note(model: nn.Module) -> str | None:
    """Say which parts `model.train()` changes; None where there are none.

    A model that is in eval mode itself trains as a whole: `from_pretrained` returns such.
    """
    names = list(_changed(model)) if model.training else []
    if not names:
        return None
    others = f" and {len(names) - _SAID} others" if len(names) > _SAID else ""
    said = f"{', '.join(names[:_SAID])}{others}"
    return (
        f"{said}: made in eval mode, and trained in training mode, as after model.train() in a "
        "plain loop. To keep eval mode, let the class say so: def train(self, mode=True): return "
        "super().train(False)"
    )


def _changed(model: nn.Module) -> Iterator[str]:
    """Yield the outermost parts in eval mode that `model.train()` lets train, if it matters."""
    found = {name: part for name, part in model.named_modules() if not part.training}
    with modes_kept(model):
        model.train()
        trained = [name for name, part in found.items() if part.training]
    for name in trained:
        if name.rpartition(".")[0] not in trained and _goes_by_mode(found[name]):
            yield name


def _goes_by_mode(part: nn.Module) -> bool:
    """Whether a part may compute something else in training: a class of the user's may ask."""
    kinds = (type(each) for each in part.modules())
    return any(issubclass(kind, _MODES) or not _is_torchs(kind) for kind in kinds)


def _is_torchs(kind: type) -> bool:
    """Whether a class is one of torch's own."""
    return kind.__module__.partition(".")[0] == "torch"
