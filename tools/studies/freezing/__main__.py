"""Freezing while training: a schedule of what trains no more from when on, cut anew each time.

    python -m tools.studies.freezing --write results.md [--steps 36]
        [--freeze 12:embed,blocks.0-1]

A vision transformer on scikit-learn's digits, on three devices. At each step of the schedule the
run ends with a commit, `resplit --freeze` cuts it anew, and it goes on. Beside it: one plain
PyTorch process that freezes at the same steps, bit by bit; and the last blocks trained alone.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tools.studies.freezing.run import (
    MICRO_BATCHES,
    OPTIMIZERS,
    SEED,
    Freeze,
    Phase,
    Size,
    read_schedule,
    run_schedule,
    trained_alone,
    weights_of,
    written,
)

SCHEDULE = ("12:embed,places,blocks.0-1", "24:blocks.2-3")
CUT = ("ops on each device", "forward only", "AdamW's state", "forecast, images/s")
TOLD = ("images a processor second", "loss")
LAST = 5  # steps whose mean loss is told

# --------------------------------------------------------------------------- plain PyTorch


def plain(
    bundle: Path, schedule: Sequence[Freeze], steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process that freezes at the same steps; return losses and weights."""
    torch.set_num_threads(1)
    module = _module(bundle.parent / "vit.py")
    model: nn.Module = module.model().train()
    for file in sorted((bundle / "weights").glob("*.safetensors")):
        model.load_state_dict(load_file(file), strict=False)
    due = {each.step: each.modules for each in schedule}
    optimizer, losses = module.optimizer(list(model.named_parameters())), []
    data = module.batches(SEED)
    for step in range(steps):
        if step in due:
            freeze(model, due[step])
            optimizer = _without_frozen(optimizer, model, module)
        losses.append(_step(model, optimizer, module.loss, next(data)))
    return losses, dict(model.named_parameters())


def freeze(model: nn.Module, modules: Sequence[str]) -> None:
    """Freeze "blocks.0-1" and the like."""
    for name in (one for text in modules for one in _each(text)):
        model.get_submodule(name).requires_grad_(False)


def _each(text: str) -> Iterator[str]:
    head, _, last = text.rpartition(".")
    first, dash, end = last.partition("-")
    if not dash:
        yield text
        return
    yield from (f"{head}.{number}" for number in range(int(first), int(end) + 1))


def _without_frozen(
    optimizer: torch.optim.Optimizer, model: nn.Module, module: ModuleType
) -> torch.optim.Optimizer:
    """Return a new optimizer for what still trains, with its state."""
    left = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    made: torch.optim.Optimizer = module.optimizer(left)
    for _, parameter in left:
        made.state[parameter] = optimizer.state[parameter]
    return made


def _step(model: nn.Module, optimizer: Any, loss_of: Any, batch: Mapping[str, Tensor]) -> float:  # noqa: ANN401
    parts = [batch[name].tensor_split(MICRO_BATCHES) for name in ("images", "digits")]
    losses = []
    for images, digits in zip(*parts, strict=True):
        loss = loss_of(model(images.clone()), {"digits": digits.clone()})
        loss.backward(torch.full_like(loss, 1 / MICRO_BATCHES))
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(torch.stack(losses).mean())


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def same(
    phases: Sequence[Phase], last: Path, losses: Sequence[float], own: Mapping[str, Tensor]
) -> bool:
    """Whether losses and weights are those of the plain process, bit by bit."""
    ours, found = [x for phase in phases for x in phase.losses], weights_of(last)
    alike = found.keys() == own.keys() and all(torch.equal(found[n], own[n]) for n in own)
    return ours == list(losses) and alike


# --------------------------------------------------------------------------- the page

PAGE = """# Freezing while training

Written by `python -m tools.studies.freezing --write results.md --steps {steps}
{freezes}`; do not edit.

`bigbrain-fx resplit BUNDLE --devices cluster.json --freeze embed,blocks.0-1 --out NEW` goes on
from the newest commit with these modules frozen: no gradients, no optimizer's state, and a cut
of its own, as their backward passes are gone. A frozen stage with nothing trained before it
runs forward only. What goes on is what one process computes that calls `requires_grad_(False)`
at that step and keeps the optimizer's state of the rest. PipeTransformer (He et al., ICML 2021)
freezes so, and gives the devices that it frees to more replicas; here the devices stay, and
stages are cut anew. A module that does not exist is refused with the nearest names.

A vision transformer ({blocks} blocks of width {width}, 2 x 2 patches of scikit-learn's digits),
{rows} images a step in {micro} micro-batches, three alike devices, 1F1B, cut by chain-dp.
*Forecast* is of the pipeline on these devices (analytical); *as cut before* is what it would be
with the blocks where they were. *A processor second* is measured: images by the processor time
of all three devices together, medians of the steps (quartiles). Wall time was not measured: the
machine was shared.

## A schedule

{phases_head}
{phases}

Losses and all weights after {steps} steps are those of one plain PyTorch process that freezes
at the same steps, bit by bit: {same}.

## The last blocks alone

The same model, frozen in its file from step 0, {steps} steps. It starts from random weights,
not from a checkpoint: what is trained less also learns less here, and the rates are what
counts.

{alone_head}
{alone}
"""


@click.command()
@click.option("--steps", default=36, show_default=True)
@click.option("--freeze", "freezes", multiple=True, default=SCHEDULE, metavar="STEP:MODULES")
@click.option("--write", type=click.Path(path_type=Path), help="The page.")
def main(steps: int, freezes: tuple[str, ...], write: Path | None) -> None:
    """Print the page, or write it."""
    page = measured(steps, freezes, Size())
    if write is None:
        click.echo(page)
    else:
        write.write_text(page)


def measured(steps: int, freezes: Sequence[str], size: Size) -> str:
    """Run everything; return the page."""
    schedule, alike = read_schedule(freezes, steps), {}
    phases: list[Phase] = []
    with tempfile.TemporaryDirectory(prefix="freezing-") as name:
        for optimizer in reversed(OPTIMIZERS):  # AdamW's phases are shown
            bundle = written(Path(name) / optimizer, optimizer, size)
            phases, last = run_schedule(bundle, schedule, steps)
            alike[optimizer] = same(phases, last, *plain(bundle, schedule, steps))
        counts = sorted({0, 1, 2, size.blocks // 2, size.blocks}, reverse=True)
        alone = {k: trained_alone(Path(name) / f"last-{k}", k, size, steps) for k in counts}
    ends = [*(str(each.step) for each in schedule), str(steps)]
    return PAGE.format(
        steps=steps,
        freezes=" ".join(f"--freeze {text}" for text in freezes),
        micro=MICRO_BATCHES,
        **vars(size),
        phases_head=_head("steps", "frozen", *CUT, "as cut before", *TOLD),
        alone_head=_head("trained", *CUT, *TOLD),
        phases="\n".join(
            _phase_row(start, end, phase)
            for start, end, phase in zip(["0", *ends], ends, phases, strict=False)
        ),
        same=", ".join(f"{name} {'yes' if is_so else 'NO'}" for name, is_so in alike.items()),
        alone="\n".join(_alone_row(k, phase, size) for k, phase in alone.items()),
    )


def _phase_row(start: str, end: str, phase: Phase) -> str:
    kept = "-" if phase.kept_cut_s is None else f"{phase.rows / phase.kept_cut_s:.0f}"
    cells = (f"{start} to {end}", phase.frozen, *_cut(phase), _forecast(phase), kept)
    return _row(*cells, _rate(phase), _loss(phase))


def _alone_row(count: int, phase: Phase, size: Size) -> str:
    last = f"the last {count} blocks and the head" if count else "norm and head"
    what = "everything" if count == size.blocks else last
    return _row(what, *_cut(phase), _forecast(phase), _rate(phase), _loss(phase))


def _head(*names: str) -> str:
    return _row(*names) + "\n" + _row(*["---"] * len(names))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cut(phase: Phase) -> tuple[str, str, str]:
    stages, graph = phase.plan.stages.stages, phase.plan.graph
    ops = ", ".join(str(len(stage.ops)) for stage in stages)
    flat = [s.device for s in stages if s.index not in phase.plan.trained]
    trained = [p.spec.nbytes for p in graph.params if p.spec.requires_grad]
    return ops, ", ".join(flat) or "-", f"{2 * sum(trained) / 1e6:.2f} MB"


def _forecast(phase: Phase) -> str:
    return f"{phase.rows / phase.plan.forecast.step_s:.0f}"


def _rate(phase: Phase) -> str:
    if len(phase.processor_s) < 2:
        return "-"  # too few steps to tell
    low, middle, high = statistics.quantiles([phase.rows / s for s in phase.processor_s], n=4)
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def _loss(phase: Phase) -> str:
    return f"{statistics.mean(phase.losses[-LAST:]):.3f}"


if __name__ == "__main__":
    main()
