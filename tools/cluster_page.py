"""The page of cluster.json, made of the pydantic models that read it; `tools.reference` writes it.

page()      docs/reference/cluster-file.md
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bigbrain_fx.cli.templates import CLUSTER
from bigbrain_fx.cluster import schema

Part = dict[str, Any]
INTRODUCTION = """\
# cluster.json

For those who describe devices and links to `--devices`. Written by `python -m tools.reference`
from the models that read the file; `bigbrain-fx schema` prints the same as JSON Schema. How to
get one is in [Describe your cluster](../how-to/describe-your-cluster.md).

Rates are what a device *sustains*, not its datasheet's peak: a `preset` has both. Every quantity
has its unit in the text: `"24GiB"`, `"60GFLOP/s"`, `"1Gbit/s"`, `"50us"`. An unknown field is
refused, with its line. `"$comment"` is allowed in every object and ignored.

`bigbrain-fx init` writes this one:
"""
TITLES = {
    "ClusterFile": "The file",
    "DeviceEntry": "devices",
    "OverheadsEntry": "devices: overheads",
    "LinksEntry": "links",
    "LinkEntry": "links: default, same_host",
    "BetweenEntry": "links: between",
    "HostEntry": "hosts",
    "StoreEntry": "stores",
}


def page() -> str:
    """Return the page."""
    whole = schema()
    parts: dict[str, Part] = {"ClusterFile": whole, **whole["$defs"]}
    lines = [INTRODUCTION, "```json", CLUSTER.strip(), "```", ""]
    for name, title in TITLES.items():
        lines += [
            f"## {title}",
            "",
            _plain(parts[name].get("description", "")),
            "",
            *_table(parts[name]),
        ]
    presets = parts["DeviceEntry"]["properties"]["preset"]["examples"]
    lines += ["## Presets", "", ", ".join(f"`{name}`" for name in presets), ""]
    return "\n".join(lines)


def _table(part: Part) -> Iterator[str]:
    """Yield a table of the fields of an object."""
    yield from ("| field | value | default | meaning |", "|---|---|---|---|")
    required = part.get("required", [])
    for name, field in part["properties"].items():
        if name.startswith("$"):
            continue
        default = "required" if name in required else _default(field)
        yield f"| `{name}` | {_value(field)} | {default} | {_plain(field.get('description', ''))} |"
    yield ""


def _default(field: Part) -> str:
    found = field.get("default")
    return f"`{found}`" if found not in (None, "", []) else ""


def _value(field: Part) -> str:
    """Return what may stand there, with an example of its unit."""
    if "$ref" in field:
        return "an object"
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    if field.get("type") == "array":
        return "a list"
    if field.get("type") == "object":
        return "an object"
    if "examples" in field:
        return f'text, such as `"{field["examples"][0]}"`'
    return {"integer": "a whole number", "string": "text"}.get(field.get("type", ""), "an object")


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
