"""Fields of a cluster.json; the JSON Schema comes from here.

This module describes the file; what its parts mean together (pairs, presets, hosts) is `resolve`'s.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
)

from bigbrain_fx.cluster import quantity
from bigbrain_fx.cluster.presets import PRESETS
from bigbrain_fx.cluster.quantity import BadValueError, Quantity, quoted

MAX_DEVICES = 4096  # links within a host, and of hosts that are named, are kept per pair

# No shell metacharacter, no blank, no slash, and no leading hyphen or dot: a name may become a
# file name, and a host an argument of ssh or torchrun.
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
_HOST = r"^[A-Za-z0-9:][A-Za-z0-9_.:-]{0,252}$"


def _device_name(name: str) -> str:
    if re.fullmatch(_NAME, name) and not name.endswith("\n"):
        return name
    raise BadValueError(
        f"not a device name: {quoted(name)}",
        "use letters, digits, '_', '-' and '.', a letter or digit first, 63 at most: \"gpu0\"",
        code="BX1023",
    )


def _host_name(name: str) -> str:
    if re.fullmatch(_HOST, name) and not name.endswith("\n") and (":" not in name or _is_ip(name)):
        return name
    raise BadValueError(
        f"not a host name or address: {quoted(name)}",
        'use a name like "node-1.lab" or an IP address, without user, port or shell characters',
        code="BX1024",
    )


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _text(pattern: str, description: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "description": description})


def _amount(
    kind: Quantity, read: Callable[[object], object]
) -> tuple[BeforeValidator, WithJsonSchema]:
    schema = {
        "type": "string",
        "pattern": kind.pattern,
        "examples": [kind.example],
        "description": f"{kind.noun[0].upper()}{kind.noun[1:]} with its unit.",
    }
    return BeforeValidator(read), WithJsonSchema(schema)


DeviceName = Annotated[str, AfterValidator(_device_name), _text(_NAME, "A device's name.")]
HostName = Annotated[
    str, AfterValidator(_host_name), _text(_HOST, "A host: a name or an IP address.")
]
OptionalMemory = Annotated[int | None, *_amount(quantity.MEMORY, quantity.memory_bytes)]
Capacity = Annotated[int, *_amount(quantity.MEMORY, quantity.memory_bytes)]
OptionalCompute = Annotated[float | None, *_amount(quantity.COMPUTE, quantity.flops_per_s)]
Bandwidth = Annotated[float, *_amount(quantity.BANDWIDTH, quantity.bytes_per_s)]
OptionalBandwidth = Annotated[float | None, *_amount(quantity.BANDWIDTH, quantity.bytes_per_s)]
Time = Annotated[float, *_amount(quantity.TIME, quantity.seconds)]
OptionalTime = Annotated[float | None, *_amount(quantity.TIME, quantity.seconds)]
Usd = Annotated[
    float | None,
    BeforeValidator(quantity.usd),
    WithJsonSchema({"type": "number", "minimum": 0, "description": "US dollars."}),
]


def _hide_null(schema: dict[str, Any]) -> None:
    """Take null out of the schema: it stands for "left out" and is no value to write."""
    schema.pop("default", None)
    for option in schema.pop("anyOf", ()):
        schema.update(option if option != {"type": "null"} else {})


def _left_out(**extra: Any) -> Any:  # noqa: ANN401  # a Field stands for a value of any type
    return Field(default=None, json_schema_extra=_hide_null, **extra)


class StrictModel(BaseModel):
    """The habits of every object in the file: no unknown field, no guessing of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    comment: str | None = _left_out(alias="$comment", description="A note for people; ignored.")


class OverheadsEntry(StrictModel):
    """Times of the device's process beside computing; `doctor` measures them. All default to 0."""

    message: Time = Field(
        default=0.0,
        json_schema_extra={"default": "0s"},
        description="Its own time for each message that it sends or receives.",
    )
    message_bandwidth: OptionalBandwidth = _left_out(
        description="What it handles of a message's bytes, sending or receiving. Left out: no time."
    )
    instruction: Time = Field(
        default=0.0,
        json_schema_extra={"default": "0s"},
        description="Around each forward and each backward of a stage.",
    )
    step: Time = Field(
        default=0.0,
        json_schema_extra={"default": "0s"},
        description="Once a step: the data loader, posted receives.",
    )
    blocking: bool = Field(
        default=False,
        description="Whether the device waits for each message that it sends to another stage, as "
        "in Megatron-DeepSpeed; programs of this project compute meanwhile.",
    )


class DeviceEntry(StrictModel):
    """One device. With a preset the other rates may be left out; what is written overrides it."""

    name: DeviceName
    host: HostName = Field(default="localhost", description="The machine the device is in.")
    kind: Literal["cpu", "cuda"] | None = _left_out(
        description="Where its tensors live; a preset is cuda."
    )
    preset: str | None = _left_out(
        description="A card by name: its memory, and what models reach of its datasheet's rates.",
        examples=list(PRESETS),
    )
    memory: OptionalMemory = _left_out(
        description="What the device has: a card's memory, or a process's part of the host's."
    )
    flops: OptionalCompute = _left_out(
        description="What it sustains in float32, with all its threads; not the datasheet's peak."
    )
    half_flops: OptionalCompute = _left_out(
        description="Of products in float16 and bfloat16. Left out: the preset's, or flops."
    )
    tf32_flops: OptionalCompute = _left_out(
        description="In TF32: of convolutions, and of products if matmul_precision is high. "
        "Left out: the preset's; a device without one has no TF32."
    )
    matmul_precision: Literal["highest", "high", "medium"] = Field(
        default="highest",
        description="As torch.set_float32_matmul_precision: high multiplies float32 in TF32.",
    )
    memory_bandwidth: OptionalBandwidth = _left_out(
        description="What it sustains in copying its own memory."
    )
    process_memory: OptionalMemory = _left_out(
        description="What its process takes beside tensors: context, kernels, NCCL, a framework of "
        "another runtime. Left out: 600MiB on cuda, 40MiB on a CPU."
    )
    blas_workspace: OptionalMemory = _left_out(
        description="What cuBLAS keeps on a cuda device for each thread that multiplies; `doctor` "
        "finds it. Left out: the preset's, or a guess from half_flops."
    )
    launch: OptionalTime = _left_out(
        description="What starting one op costs; on cuda its process's time, 0s with CUDA graphs. "
        "Left out: 5us on cpu, 15us on cuda, 10.5us with a preset from Ampere on."
    )
    threads: int = Field(
        default=1, ge=1, le=4096, description="CPU threads its process computes with."
    )
    processor: str = Field(
        default="",
        description="Its own name, which `doctor` writes: ops that `profile` measured on a device "
        "of this name are taken as they are. Left out: they are scaled by the rates.",
    )
    kernels: dict[str, Time] | None = _left_out(
        description="Seconds of calls that `doctor` timed on a cuda device, by name: forecasts of "
        "ops like them are corrected by these. Left out: nothing is."
    )
    overheads: OverheadsEntry | None = _left_out(
        description="What its process does beside computing. Left out: nothing."
    )
    price_per_hour_usd: Usd = _left_out(
        description="What it costs by the hour, in US dollars; 0 if it is yours. Left out: not "
        "known, and no plan is told by its cost."
    )


class LinkEntry(StrictModel):
    """A connection: a message of n bytes takes latency + n / bandwidth, either way."""

    bandwidth: Bandwidth
    latency: Time
    bandwidth_by_size: dict[str, Bandwidth] | None = _left_out(
        description='What messages of some sizes reach, as {"64KiB": "0.3GB/s"}: bandwidth is '
        "that of larger ones. Linear in time between sizes. Left out: all reach bandwidth."
    )
    price_per_gb_usd: Usd = _left_out(
        description="What 10**9 bytes over it cost, either way, in US dollars. Left out: nothing."
    )

    @field_validator("bandwidth_by_size")
    @classmethod
    def _sizes(cls, given: dict[str, float] | None) -> dict[str, float] | None:
        for size in given or {}:
            quantity.memory_bytes(size)
        return given


class BetweenEntry(LinkEntry):
    """An exception: the connection of two devices, or all pairs of two hosts or two zones."""

    devices: Annotated[list[DeviceName], Field(min_length=2, max_length=2)] | None = _left_out()
    hosts: Annotated[list[HostName], Field(min_length=2, max_length=2)] | None = _left_out()
    zones: Annotated[list[DeviceName], Field(min_length=2, max_length=2)] | None = _left_out(
        description="Two zones, or one of them twice: unlike hosts of the zone."
    )


class LinksEntry(StrictModel):
    """The connections; an exception for two devices wins over one for their hosts."""

    default: LinkEntry | None = _left_out(
        description="Any pair without an entry. Left out: 1Gbit/s and 0.1ms."
    )
    same_host: LinkEntry | None = _left_out(
        description="Devices of one host. Left out: what presets say of NVLink and PCIe; of "
        "others the default, without one 1GB/s and 50us."
    )
    between_zones: LinkEntry | None = _left_out(
        description="Devices of different zones without an entry in between. Left out: each two "
        "zones need one."
    )
    between: list[BetweenEntry] = Field(default=[], description="Exceptions.")


class HostEntry(StrictModel):
    """A host whose devices share something scarce; their own rates are those of each alone.

    What `doctor` measures of several devices at once is slowed already: name neither cores nor
    memory bandwidth beside such rates.
    """

    name: HostName
    nic: OptionalBandwidth = _left_out(
        description="Of all messages that leave the host together, and of all that enter it."
    )
    memory_bandwidth: OptionalBandwidth = _left_out(
        description="Of all its CPU devices together; while more is wanted, they share it."
    )
    cores: int | None = _left_out(
        ge=1, le=4096, description="That the threads of its CPU devices share."
    )


class ZoneEntry(StrictModel):
    """Hosts of one place (a region, a building): links between zones are said for all of them."""

    name: DeviceName
    hosts: list[HostName] = Field(min_length=1, description="Each host stands in one zone.")


class StoreEntry(StrictModel):
    """Offload target of a device: `split --offload` moves tensors there that it does not need."""

    name: DeviceName
    device: DeviceName = Field(description="The device that it is for; each has one at most.")
    capacity: Capacity = Field(description="How much the store takes.")
    bandwidth: Bandwidth = Field(description="Of what is written to it, and of what is read.")
    folder: str | None = _left_out(
        min_length=1,
        max_length=4096,
        description="A folder on a disk of the device's host, which is there already. Left out: "
        "the memory of a cuda device's host.",
    )


class ClusterFile(StrictModel):
    """The devices to split a model over, in pipeline order, and the connections between them."""

    schema_url: str | None = _left_out(
        alias="$schema", description="Where the editor finds this schema; ignored."
    )
    devices: list[DeviceEntry] = Field(min_length=1, max_length=MAX_DEVICES)
    links: LinksEntry = Field(default_factory=LinksEntry)
    hosts: list[HostEntry] = Field(
        default=[], description="Hosts whose devices share a NIC, memory bandwidth or cores."
    )
    stores: list[StoreEntry] = Field(
        default=[], max_length=MAX_DEVICES, description="Where devices put what memory cannot hold."
    )
    zones: list[ZoneEntry] = Field(
        default=[], max_length=MAX_DEVICES, description="Where hosts stand; all, or none."
    )
    replicas: list[list[str]] = Field(
        default=[],
        max_length=MAX_DEVICES,
        description="The devices of each copy of the model, by name; others stay unused.",
    )


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a cluster file, for editors to check with."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **ClusterFile.model_json_schema(mode="validation"),
        "title": "bigbrain-fx cluster",
    }
