"""Turn Sailor's profile of a model's layers into the file that `--profile` reads.

    python -m tools.studies.sailor_peer.sailor_profile sailor_profile_opt350.json -o opt350.json
        [--first tokens,positions --blocks blocks --last norm,head,loss]

Theirs: {model: {card: {rows: {tensor: {layer: [forward, backward, update]}}}}}, the first layer the
embedding, the last the head and the loss. Layers between are blocks of equal sizes: the middle of
their times stands for each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TypeAlias

import click

CARDS = {
    "A100-40": "a100-40",
    "A100-80": "a100-80",
    "GH-96": "gh200-96",
    "H100-80": "h100",
    "V100-16": "v100-16",
    "RTX-3090": "rtx-3090",
    "Titan-RTX": "titan-rtx",
    "RTX-2080": "rtx-2080-ti",
}
"""Theirs, and our presets; their RTX-2080 multiplies and remembers as a 2080 Ti."""
Seconds: TypeAlias = Sequence[float]
Each: TypeAlias = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Seconds]]]]


def converted(
    each: Each, first: Sequence[str], blocks: str, last: Sequence[str]
) -> dict[str, object]:
    """Return the file's content.

    Args:
        each: of one model, by card, rows, degree and layer.
        first: the modules of its layer 0.
        blocks: the list of its layers between.
        last: the modules of its last layer.
    """
    names = (list(first), [f"{blocks}.*"], list(last))
    layers = [
        {"modules": modules, "times": list(_times(each, place))}
        for place, modules in enumerate(names)
    ]
    return {"format": "layer-times-1", "layers": layers}


def _times(each: Each, place: int) -> Iterator[dict[str, object]]:
    for card, by_rows in each.items():
        for rows, by_degree in by_rows.items():
            for degree, layers in by_degree.items():
                forward, backward, update = _middle(layers, place)
                yield {
                    "card": CARDS.get(card, card.lower()),
                    "rows": int(rows),
                    "tensor": int(degree),
                    "forward": forward,
                    "backward": backward,
                    "update": update,
                }


def _middle(layers: Mapping[str, Seconds], place: int) -> Seconds:
    """Return the seconds of the first layer, of the middle one of the blocks, or of the last."""
    order = sorted(layers, key=int)
    chosen = ([order[0]], order[1:-1], [order[-1]])[place]
    return [median(column) for column in zip(*(layers[name] for name in chosen), strict=True)]


@click.command()
@click.argument("profile", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--model", default="", help="Of a file of several models: its name there.")
@click.option("--first", default="tokens,positions", show_default=True)
@click.option("--blocks", default="blocks", show_default=True)
@click.option("--last", default="norm,head,loss", show_default=True)
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True)
def main(profile: Path, model: str, first: str, blocks: str, last: str, out: Path) -> None:
    """Write the file of PROFILE that `bigbrain-fx estimate --profile` reads."""
    content = json.loads(profile.read_text(encoding="utf-8"))
    name = model or next(iter(content))
    found = converted(content[name], first.split(","), blocks, last.split(","))
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    click.echo(f"wrote {out}: {name}, {', '.join(CARDS.get(card, card) for card in content[name])}")


if __name__ == "__main__":
    main()
