"""The user's batches as plain PyTorch has them: drawn, filled up, and taken apart by rows.

It reads what a model file says of its data, and shares nothing with the runtime's data stream.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from bigbrain_fx.frontend import ModelFile
from bigbrain_fx.verification.draws import States, set_states, states

Path_ = tuple[Any, ...]  # where a tensor is in a batch: keys and places


def drawn(file: ModelFile, seed: int) -> Iterator[object]:
    """Yield the user's batches, drawn with a random state of their own; else the example."""
    if file.batches is None:
        yield from repeat(file.example_batch)
        return
    dice = _seeded_dice(seed)
    source: Iterator[object] | None = None
    while True:
        before = states()
        set_states(dice)
        try:
            source = iter(file.batches(seed)) if source is None else source
            batch = next(source)
        except StopIteration:
            return
        finally:
            dice = states()
            set_states(before)
        yield batch


def _seeded_dice(seed: int) -> States:
    """Return the states in which torch's, Python's and, if loaded, NumPy's generators begin."""
    numpy_random = sys.modules.get("numpy.random")
    own = numpy_random.RandomState(seed % 2**32).get_state() if numpy_random else None
    torch_state = torch.Generator().manual_seed(seed).get_state()
    return torch_state, random.Random(seed).getstate(), own


def split_entries(
    example: object, dims: Mapping[str | int, int | str | None], others: Collection[Path_] = ()
) -> dict[Path_, int]:
    """Return the dimension that is the batch of every tensor that has its rows.

    They are the most common length of dimension 0, but where the file says which dimension it is.
    `others` have other rows than the batch: boxes of an image, offsets.
    """
    found: dict[Path_, Tensor] = {}
    tensors_of(example, lambda tensor, path: found.setdefault(path, tensor))
    found = {path: tensor for path, tensor in found.items() if path not in others}
    said = {
        path: dim
        for name, dim in dims.items()
        for path in found
        if _is_of(path, name) and not isinstance(dim, str)
    }
    own = [found[path].shape[dim] for path, dim in said.items() if dim is not None]
    lengths = Counter(own or [t.shape[0] for p, t in found.items() if t.dim() and p not in said])
    rows = lengths.most_common(1)[0][0] if lengths else None
    rest = {p: 0 for p, t in found.items() if p not in said and t.dim() and t.shape[0] == rows}
    return rest | {path: dim for path, dim in said.items() if dim is not None}


def _is_of(path: Path_, name: str | int) -> bool:
    """Whether a tensor is in the entry that the model file calls so: "x", 0, "pair.0"."""
    return f"{'.'.join(map(str, path))}.".startswith(f"{name}.")


def padding(
    example: object,
    pad: Mapping[str | int, int | float],
    split: Mapping[Path_, int],
    lengths: Mapping[Path_, Sequence[int]],
    buckets: Sequence[int],
) -> Callable[[Tensor, Path_], Tensor]:
    """Return what fills a tensor up to the example's shape, but for its rows.

    In the dimensions `lengths` it is filled up to the next of `buckets`.
    """
    found: dict[Path_, Tensor] = {}
    tensors_of(example, lambda tensor, path: found.setdefault(path, tensor))

    def padded(tensor: Tensor, path: Path_) -> Tensor:
        fills = [fill for name, fill in pad.items() if _is_of(path, name)]
        if not fills:
            return tensor
        shape = list(found[path].shape)
        for dim in lengths.get(path, ()):
            own = tensor.shape[dim]
            shape[dim] = min((length for length in buckets if length >= own), default=own)
        if path in split:
            shape[split[path]] = tensor.shape[split[path]]
        made = torch.full(shape, fills[-1], dtype=tensor.dtype)
        made[tuple(slice(size) for size in tensor.shape)] = tensor
        return made

    return padded


def share(loss: Tensor, weights: Sequence[float], micro: int) -> Tensor:
    """Weigh a micro-batch's loss, by its rows or its count; equal weights divide by their number.

    One without weight has no part in that number.
    """
    counted = [weight for weight in weights if weight]
    if len({*counted}) == 1:
        return loss / len(counted) if weights[micro] else torch.zeros_like(loss)
    return loss * (weights[micro] / sum(counted))


def mean(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return a step's loss, the mean by weights; losses of sixteen bits are added in 32."""
    losses = [loss.float() if loss.dtype.itemsize < 4 else loss for loss in losses]
    if len({*weights} - {0}) == 1:
        return torch.stack([t for t, w in zip(losses, weights, strict=True) if w]).mean()
    return torch.stack([share(loss, weights, micro) for micro, loss in enumerate(losses)]).sum()


def part_of(
    split: Mapping[Path_, int],
    micro: int,
    count: int,
    offsets: Mapping[Path_, int] | None = None,
) -> Callable[[Tensor, Path_], Tensor]:
    """Return what takes a micro-batch of a batch's tensor, in memory of its own.

    `offsets` has the positions of all rows that entries of offsets count.
    """

    def part(tensor: Tensor, path: Path_) -> Tensor:
        if offsets and path in offsets:
            first = offsets[path] * micro // count
            return (tensor - first).clamp(min=0, max=offsets[path] // count)
        if path not in split:
            return tensor.clone()
        rows, over = divmod(tensor.shape[split[path]], count)
        first, size = micro * rows + min(micro, over), rows + (micro < over)
        if not split[path]:
            return tensor[first : first + size].clone()
        return tensor.narrow(split[path], first, size).clone(memory_format=torch.contiguous_format)

    return part


def divided(batch: Any, path: Path_, rows: int, of_all: int) -> Any:  # noqa: ANN401
    """Return a batch with what some of all rows have of a count, a number or a tensor."""
    if not path:
        own = isinstance(batch, Tensor)
        return (batch.double() * rows / of_all).to(batch.dtype) if own else batch * rows / of_all
    if isinstance(batch, Mapping):
        return {**batch, path[0]: divided(batch[path[0]], path[1:], rows, of_all)}
    here = path[0]
    parts = [divided(v, path[1:], rows, of_all) if i == here else v for i, v in enumerate(batch)]
    return parts if isinstance(batch, list) else getattr(type(batch), "_make", tuple)(parts)


def wide(tensor: Tensor, _: Path_) -> Tensor:
    """Return a tensor of numbers in float64."""
    return tensor.double() if tensor.is_floating_point() else tensor


def tensors_of(batch: Any, change: Callable[[Tensor, Path_], Tensor], path: Path_ = ()) -> Any:  # noqa: ANN401
    """Return a batch like this one with every tensor changed."""
    if isinstance(batch, Tensor):
        return change(batch, path)
    if isinstance(batch, Mapping):
        return {key: tensors_of(value, change, (*path, key)) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [tensors_of(value, change, (*path, i)) for i, value in enumerate(batch)]
        return parts if isinstance(batch, list) else getattr(type(batch), "_make", tuple)(parts)
    return batch


def inputs(batches: Sequence[object]) -> dict[str, Tensor]:
    """Return all tensors of micro-batches, by micro-batch and place; see `input_name`."""
    found: dict[str, Tensor] = {}
    for micro, batch in enumerate(batches):
        tensors_of(batch, lambda t, path, m=micro: found.setdefault(input_name(m, path), t))  # type: ignore[misc]
        found.update(_numbers(batch, (), micro))
    return found


def _numbers(batch: Any, path: Path_, micro: int) -> dict[str, Tensor]:  # noqa: ANN401
    """Return the numbers of a micro-batch as tensors, by micro-batch and place."""
    if isinstance(batch, Mapping | tuple | list):
        pairs = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        inner = [_numbers(value, (*path, key), micro) for key, value in pairs]
        return {name: value for found in inner for name, value in found.items()}
    if isinstance(batch, int | float) and not isinstance(batch, bool):
        return {number_name(micro, path): torch.tensor(batch, dtype=torch.float64)}
    return {}


def number_name(micro: int, path: Path_) -> str:
    """Return the name under which a number of a micro-batch is kept."""
    return json.dumps(["number", micro, *path], default=str)


def input_name(micro: int, path: Path_) -> str:
    """Return the name under which a tensor of a micro-batch is kept."""
    return json.dumps([micro, *path], default=str)
