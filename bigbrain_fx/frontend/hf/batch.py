"""An example batch for a Hugging Face model, made up from its configuration and its forward.

Rows hold random tokens, pixels or samples of the sizes that the configuration gives. A class that
takes labels gets them, so that it returns a loss. This file knows the conventions of transformers
(argument names, task tables, names of sizes); it knows no single model.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.location import HfLocation

ROWS = 8
LENGTH = 128  # tokens of a row, where the model has as many positions
FRAMES = 64  # audio: frames after the convolutions
_PIXELS = 224
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
)
_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# task, by transformers' own tables -> what its labels are
_LABELS = {
    "CAUSAL_LM": "tokens",
    "SEQ_TO_SEQ_CAUSAL_LM": "tokens",
    "SPEECH_SEQ_2_SEQ": "tokens",
    "MASKED_LM": "tokens",
    "IMAGE_TEXT_TO_TEXT": "tokens",
    "SEQUENCE_CLASSIFICATION": "classes",
    "IMAGE_CLASSIFICATION": "classes",
    "AUDIO_CLASSIFICATION": "classes",
    "VIDEO_CLASSIFICATION": "classes",
    "NEXT_SENTENCE_PREDICTION": "classes",
    "MULTIPLE_CHOICE": "choices",
    "TOKEN_CLASSIFICATION": "token classes",
    "QUESTION_ANSWERING": "spans",
    "SEMANTIC_SEGMENTATION": "pixel classes",
    "CTC": "transcripts",
    "PRETRAINING": "tokens",
}
_HELP = """write a model.py and split that:
    def model(): return {kind}({config}.from_json_file("{path}"))
    def example_batch(): return {{"{name}": torch.zeros(8, 128, dtype=torch.long)}}"""


def example_batch(model: nn.Module, at: HfLocation) -> dict[str, object]:
    """Make up a batch, by the names of forward's parameters.

    Raises:
        InputError: forward needs something that cannot be made up from the configuration.
    """
    facts = _Facts(model, at)
    inputs = {name: make(facts) for name, make in _INPUTS.items() if facts.gets(name)}
    batch = {**inputs, **_labels(facts, inputs)}
    lacking = [name for name in facts.required if name not in batch]
    if lacking or not batch:
        raise InputError(
            f"no example batch can be made up for {type(model).__name__}: forward needs "
            f"{', '.join(lacking) or facts.main}",
            code="BX2050",
            at=str(at.path),
            help=_HELP.format(
                kind=type(model).__name__,
                config=type(facts.config).__name__,
                path=at.path,
                name=(lacking or [facts.main])[0],
            ),
        )
    return batch


@dataclass(frozen=True)
class _Facts:
    """Facts that the model states of itself."""

    model: nn.Module
    at: HfLocation

    @property
    def config(self) -> Any:  # noqa: ANN401  # transformers' own class
        return self.model.config

    @property
    def main(self) -> str:
        return str(getattr(self.model, "main_input_name", "input_ids"))

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.model.forward).parameters

    @property
    def required(self) -> list[str]:
        given = self.parameters.items()
        return [n for n, p in given if p.default is p.empty and p.kind not in _KINDS]

    @property
    def rows(self) -> int:
        return self.at.batch or ROWS

    @property
    def length(self) -> int:
        """Tokens of a row: as requested, else a power of two below the number of positions."""
        text = self.config.get_text_config()
        most = min(
            (n for k in _POSITIONS if isinstance(n := getattr(text, k, 0), int) and n > 0),
            default=0,
        )
        free = 1 << max(0, (most - 2).bit_length() - 1) if most > 2 else LENGTH
        return self.at.seq or min(LENGTH, free)

    @property
    def task(self) -> str | None:
        """Return the task of the class, by the tables of transformers' AutoModelFor... classes."""
        tables = importlib.import_module("transformers.models.auto.modeling_auto")
        name = type(self.model).__name__
        for task in _LABELS:
            classes = getattr(tables, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).values()
            if any(name in (entry if isinstance(entry, tuple) else (entry,)) for entry in classes):
                return task
        return None

    @property
    def image_size(self) -> tuple[int, int]:
        size = self.size("image_size", _PIXELS)
        if isinstance(size, Mapping):
            return int(size["height"]), int(size["width"])
        return (int(size[0]), int(size[1])) if isinstance(size, list | tuple) else (size, size)

    def gets(self, name: str) -> bool:
        """Whether the batch should have this entry."""
        if name not in self.parameters:
            return False
        if name == "decoder_input_ids":  # made from the labels where there are any
            return "labels" not in self.parameters or self.task is None
        if name == "pixel_values" and self.main != name:
            return not self._has_image_tokens
        return name in (self.main, "input_ids", *self.required)

    @property
    def _has_image_tokens(self) -> bool:
        """Whether pictures stand in the text as tokens; a batch of text alone is valid then."""
        names = ("image_token_id", "image_token_index")
        return any(isinstance(getattr(self.config, name, None), int) for name in names)

    def size(self, name: str, default: Any) -> Any:  # noqa: ANN401  # sizes come in several forms
        """Look a size up in the configuration and in its parts."""
        for part in self.parts():
            value = getattr(part, name, None)
            if value is not None:
                return value
        return default

    def parts(self) -> Iterator[Any]:
        """Yield the configuration and the configurations inside it."""
        yield self.config
        for value in vars(self.config).values():
            if hasattr(value, "model_type") and hasattr(value, "to_dict"):
                yield value

    def tokens(self, *shape: int) -> Tensor:
        """Draw tokens that mean nothing special: no padding, no end, no picture."""
        text = self.config.get_text_config()
        special = {number for part in self.parts() for number in _token_ids(part)}
        count = int(getattr(text, "vocab_size", 0) or self.size("vocab_size", 2))
        plain = torch.tensor([n for n in range(count) if n not in special] or list(range(count)))
        return plain[torch.randint(len(plain), shape)]


def _token_ids(config: Any) -> Iterator[int]:  # noqa: ANN401
    for name, value in config.to_dict().items():
        if name.endswith(("_token_id", "_token_index")):
            yield from (value if isinstance(value, list) else [value])


# --------------------------------------------------------------------------- inputs


def _input_ids(facts: _Facts) -> Tensor:
    if facts.task == "MULTIPLE_CHOICE":
        return facts.tokens(facts.rows, 2, facts.length)
    found = facts.tokens(facts.rows, facts.length)
    end = facts.config.get_text_config().eos_token_id
    if getattr(facts.config, "is_encoder_decoder", False) and isinstance(end, int):
        found[:, -1] = end  # some classify by what the decoder makes of the end
    return found


def _pixel_values(facts: _Facts) -> Tensor:
    height, width = facts.image_size
    shape = [int(facts.size("num_channels", 3)), height, width]
    frames = facts.size("num_frames", None)
    if isinstance(frames, int):
        shape.insert(0, frames)
    return torch.randn(facts.rows, *shape)


def _input_features(facts: _Facts) -> Tensor:
    """Make spectrograms: as many frames as the encoder has places for, two to one."""
    bins = facts.size("num_mel_bins", None)
    places = facts.size("max_source_positions", None)
    if (
        bins is not None
        and places is not None
        and facts.size("input_feat_per_channel", None) is None
    ):
        return torch.randn(facts.rows, int(bins), 2 * int(places))
    return torch.randn(
        facts.rows, 4 * FRAMES, int(facts.size("input_feat_per_channel", bins or 80))
    )


def _input_values(facts: _Facts) -> Tensor:
    """Make waves, or spectrograms where the configuration speaks of mel bins."""
    bins, length = facts.size("num_mel_bins", None), facts.size("max_length", None)
    if bins is not None and length is not None:
        return torch.randn(facts.rows, int(length), int(bins))
    samples = facts.at.seq or FRAMES
    strides, kernels = facts.size("conv_stride", ()), facts.size("conv_kernel", ())
    for kernel, stride in zip(reversed(list(kernels)), reversed(list(strides)), strict=False):
        samples = (samples - 1) * stride + kernel
    return torch.randn(facts.rows, samples)


def _decoder_input_ids(facts: _Facts) -> Tensor:
    return facts.tokens(facts.rows, facts.length)


def _bool_masked_pos(facts: _Facts) -> Tensor:
    height, width = facts.image_size
    patch = facts.size("patch_size", 16)
    rows, columns = patch if isinstance(patch, list | tuple) else (patch, patch)
    count = (height // rows) * (width // columns)
    frames = facts.size("num_frames", None)
    if isinstance(frames, int):
        count *= frames // int(facts.size("tubelet_size", 1))
    return (torch.arange(count) % 2 == 0).expand(facts.rows, count).clone()


_INPUTS: Mapping[str, Callable[[_Facts], Tensor]] = {
    "input_ids": _input_ids,
    "pixel_values": _pixel_values,
    "input_features": _input_features,
    "input_values": _input_values,
    "decoder_input_ids": _decoder_input_ids,
    "bool_masked_pos": _bool_masked_pos,
}


# --------------------------------------------------------------------------- labels


def _labels(facts: _Facts, batch: Mapping[str, Tensor]) -> dict[str, object]:
    """Return the labels with which the model returns a loss; nothing when it returns none."""
    if "return_loss" in facts.parameters:
        return {"return_loss": True}
    kind = _LABELS.get(facts.task or "")
    if kind == "spans":
        names = [n for n in ("start_positions", "end_positions") if n in facts.parameters]
        return {name: torch.randint(facts.length, (facts.rows,)) for name in names}
    if kind is None or "labels" not in facts.parameters:
        return {}
    more = {}
    if "next_sentence_label" in facts.parameters:
        more["next_sentence_label"] = torch.randint(2, (facts.rows,))
    return {"labels": _made(kind, facts, batch), **more}


def _made(kind: str, facts: _Facts, batch: Mapping[str, Tensor]) -> Tensor:
    rows, classes = facts.rows, int(getattr(facts.config, "num_labels", 2))
    match kind:
        case "tokens":
            length = batch["input_ids"].shape[-1] if "input_ids" in batch else facts.length
            return facts.tokens(rows, length)
        case "choices":
            return torch.randint(2, (rows,))
        case "token classes":
            return torch.randint(classes, (rows, facts.length))
        case "pixel classes":
            return torch.randint(classes, (rows, *facts.image_size))
        case "transcripts":
            return facts.tokens(rows, max(1, math.isqrt(FRAMES)))
    # one class is transformers' word for regression
    return torch.randn(rows) if classes == 1 else torch.randint(classes, (rows,))
