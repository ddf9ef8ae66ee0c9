"""Later batches, beside the numbers of tensors: what a trace has of the first one.

{"x": tensor, "scale": 0.5}  ─▶ traced, with 0.5 as a constant
{"x": tensor, "scale": 0.7}  ─▶ does the model compute something else by it?  ─▶ refused
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.entry_trial import NOTHING, Trial, trial_of
from bigbrain_fx.frontend.plain_entries import PLAIN, changes_of, goes_by
from bigbrain_fx.frontend.tracing.state.attributes import Attributes, Marks
from bigbrain_fx.frontend.tracing.state.changed_module import is_due
from bigbrain_fx.frontend.tracing.step import Loss
from bigbrain_fx.frontend.translation.batch_dims import Key

_BATCHES = 3  # that are drawn before a run


class LaterBatches:
    """Changes from batch to batch that a model reads: entries, numbers, texts, objects.

    Args:
        model: the caller's.
        example: the batch that was traced.
        loss: the caller's.
        autocast: of the trace.
    """

    def __init__(
        self, model: nn.Module, example: object, loss: Loss | None, autocast: str | None
    ) -> None:
        self._about = model, example, loss, autocast
        self._let_be: dict[Key, Marks] = {}  # the last value of those, which counted nothing
        self._tried: Counter[Key] = Counter()  # how often each has changed
        self._going: dict[Key, bool] = {}  # numbers: whether any other would count

    def require(self, batch: object) -> None:
        """Refuse a batch in which a change counts.

        Raises:
            InputError: names the entry, and both values.
        """
        new = {
            key: (before, value, _mark(value))
            for key, before, value in changes_of(self._about[1], batch)
            if self._let_be.get(key, _mark(before)) != _mark(value)
        }
        due = {key: value for key, (_, value, _) in new.items() if is_due(self._tried[key] + 1)}
        trial = self._trial() if due else None
        if trial is not None:
            if trial.reads(due):
                key = next((key for key in due if trial.reads({key: due[key]})), next(iter(due)))
                raise _refused(key, *new[key][:2])
            for key in due:
                if self._goes_by(trial, key, new[key][0]):
                    raise _refused(key, *new[key][:2])
        self._tried.update(new.keys())
        self._let_be |= {key: mark for key, (_, _, mark) in new.items()}

    def _trial(self) -> Trial:
        quick = trial_of(*self._about)
        return quick if quick.runs else Trial(*self._about)

    def _goes_by(self, trial: Trial, key: Key, before: object) -> bool:
        """Whether another number than this one counts: a threshold may, with other weights."""
        if not isinstance(before, int | float):
            return False
        if key not in self._going:
            self._going[key] = goes_by(trial, key, before)
        return self._going[key]


def require_steady(
    model: nn.Module,
    example: object,
    loss: Loss | None,
    batches: Callable[[], Iterable[object]],
    autocast: str | None = None,
) -> None:
    """Refuse first batches that change in what the model reads.

    Raises:
        InputError: names the entry and both values.
    """
    drawn: list[object] = []
    with suppress(Exception):  # whoever runs the bundle is told
        drawn.extend(itertools.islice(batches(), _BATCHES))
    later = LaterBatches(model, example, loss, autocast)
    for batch in drawn:
        later.require(batch)


def _mark(value: object) -> Marks:
    """Return what tells a value from others: a number itself, an object by its attributes."""
    found = Attributes(numbers=False)
    found.look_at("", value, lambda _: None)
    order = {"order": ", ".join(map(str, value))} if isinstance(value, Mapping) else {}
    return found.marks[""] | order


def _refused(key: Key, before: object, value: object) -> InputError:
    """Return the refusal of a batch whose entry is another, and counts."""
    name = ".".join(map(str, key))
    return InputError(
        f"batches() changes {name} from {_shown(before)} to {_shown(value)}, and the model "
        "reads it: a trace would keep the first for ever",
        code="BX2164",
        at="batches",
        help=_remedy(before, value),
    )


def _shown(value: object) -> str:
    if value is NOTHING:
        return "nothing"
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, list | tuple | Mapping):
        return f"{len(value)} entries"
    return f"an object of {type(value).__name__}"


def _remedy(before: object, value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"give it as a tensor: torch.tensor({value!r})"
    if type(before).__name__ == "ndarray" or type(value).__name__ == "ndarray":
        return "give it as a tensor, in example_batch() as well: torch.from_numpy(array)"
    if not isinstance(before, PLAIN) or not isinstance(value, PLAIN):
        return (
            "give every batch the same entries: a mask of ones, torch.ones(rows, n), where there "
            "is none, and one tensor with a dimension for what a list has more or less of, filled "
            "up and with a mask"
        )
    return (
        "let a tensor decide: compute both ways and choose with torch.where(flag, one, two), "
        "flag being a tensor of the batch (torch.tensor(True)); or split a model for each value"
    )
