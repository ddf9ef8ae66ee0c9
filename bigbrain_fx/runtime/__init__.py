"""The runtime of a bundle: copied into it verbatim.

The package imports torch and safetensors, and nothing of bigbrain-fx. Names are loaded when they
are first used: `runtime.checkpoint_store` imports no torch, so that a supervisor without it can use
it.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 10):  # noqa: UP036  # whoever takes an old one reads no traceback
    sys.stderr.write(
        f"error[BX5900]: this is Python {sys.version.split()[0]}: take 3.11 or newer\n"
    )
    sys.exit(2)

import ast
import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from . import launcher as launcher  # before the user's code, and anything that takes long, is

if TYPE_CHECKING:
    from .asynchronous import (
        AsynchronousDevice as AsynchronousDevice,
        VersionError as VersionError,
    )
    from .buckets import bucket_channels as bucket_channels
    from .bundle import Bundle as Bundle
    from .channel import Channel as Channel, Transport as Transport
    from .checkpoint_format import (
        BrokenError as BrokenError,
        CommitError as CommitError,
        Record as Record,
        about_of as about_of,
        graph_hash as graph_hash,
    )
    from .checkpoint_store import (
        ASIDE as ASIDE,
        CheckpointStore as CheckpointStore,
        Loaded as Loaded,
        first_loadable as first_loadable,
    )
    from .compiler import CompilerError as CompilerError, require_compiler as require_compiler
    from .data import Stream as Stream
    from .deferred import DeferringDevice as DeferringDevice
    from .deferred_layers import (
        Conv1d as Conv1d,
        Conv2d as Conv2d,
        Conv3d as Conv3d,
        ConvTranspose1d as ConvTranspose1d,
        ConvTranspose2d as ConvTranspose2d,
        ConvTranspose3d as ConvTranspose3d,
        Embedding as Embedding,
        Linear as Linear,
    )
    from .device import Device as Device
    from .disk import Disk as Disk, locked as locked
    from .entries import (
        as_scalar as as_scalar,
        is_number as is_number,
        is_plain as is_plain,
        said as said,
        walk as walk,
    )
    from .example_data import example_batches as example_batches
    from .fixed_entries import APART as APART, overlap as overlap
    from .forward_lines import ForwardLines as ForwardLines
    from .gradients import clipped as clipped, laid_out as laid_out, norm as norm
    from .group import (
        added as added,
        all_gather as all_gather,
        all_reduce as all_reduce,
        copy_to_group as copy_to_group,
        gather_to_group as gather_to_group,
        joined as joined,
        largest as largest,
        own_part as own_part,
        part_of_whole as part_of_whole,
        reduce_scatter as reduce_scatter,
    )
    from .hooked_device import Hooks as Hooks
    from .image import (
        FORMAT as FORMAT,
        ImageLayout as ImageLayout,
        TensorEntry as TensorEntry,
        layout_of as layout_of,
        read_layout as read_layout,
    )
    from .infer import (
        Inference as Inference,
        infer_in_process as infer_in_process,
        infer_main as infer_main,
    )
    from .kept import (
        all_seeded as all_seeded,
        assume as assume,
        assume_not as assume_not,
        flat as flat,
        part_of as part_of,
    )
    from .limits import (
        LONGEST_COMPILE_S as LONGEST_COMPILE_S,
        MEMORY as MEMORY,
        is_of_memory as is_of_memory,
        memory_remedy as memory_remedy,
    )
    from .local import Hub as Hub, LocalTransport as LocalTransport
    from .loss_scale import unscaled as unscaled
    from .loss_weight import LossWeight as LossWeight, mapped as mapped
    from .malloc import keep_freed_memory as keep_freed_memory
    from .marks import marking as marking
    from .module_state import (
        Stateful as Stateful,
        put_into as put_into,
        taken_of as taken_of,
    )
    from .modules import (
        Region as Region,
        Stage as Stage,
        Tensors as Tensors,
        WeightsError as WeightsError,
        buffer as buffer,
        parameter as parameter,
        reseed as reseed,
    )
    from .named_facts import (
        UnlikeFactsError as UnlikeFactsError,
        joined_facts as joined_facts,
        parameter_of as parameter_of,
        part_of_facts as part_of_facts,
    )
    from .network import NetworkTransport as NetworkTransport
    from .opaque_device import (
        OpaqueDevice as OpaqueDevice,
        current as current,
        keep_sparse_apart as keep_sparse_apart,
        loss_in as loss_in,
        needs_metrics as needs_metrics,
        own_loss as own_loss,
    )
    from .opaque_state import others_of as others_of
    from .optimizer_groups import OptimizerGroups as OptimizerGroups
    from .optimizer_state import (
        StateError as StateError,
        decoded as decoded,
        needs_closure as needs_closure,
        optimizer_facts as optimizer_facts,
        optimizer_tensors as optimizer_tensors,
        restore_optimizer as restore_optimizer,
    )
    from .own_dice import has_generators as has_generators, left_alone as left_alone
    from .plain import (
        ResumeError as ResumeError,
        load_optimizer as load_optimizer,
        optimizer_states as optimizer_states,
    )
    from .plain_values import UnkeptError as UnkeptError, Values as Values
    from .planned_infer import InferenceDevice as InferenceDevice
    from .promises import MakingAgain as MakingAgain, again as again
    from .rates import RewindableRates as RewindableRates
    from .recipe import LearningRates as LearningRates, Training as Training, adamw as adamw
    from .rendezvous import (
        join as join,
        leave_together as leave_together,
        own_device as own_device,
        transport_of as transport_of,
    )
    from .rows import RowStream as RowStream
    from .splitting import (
        Splitting as Splitting,
        filled_up as filled_up,
        given_parts as given_parts,
        parts_of as parts_of,
    )
    from .stores import HostRoom as HostRoom, StoredState as StoredState, StoreError as StoreError
    from .stream import BatchError as BatchError
    from .train import main as main, run_in_process as run_in_process
    from .weights import OwnWeights as OwnWeights
    from .whole_batches import WholeBatches as WholeBatches, repeated as repeated
    from .widening import widened as widened


@cache
def _homes() -> Mapping[str, tuple[str, str]]:
    """Return name -> module and its name there, as the imports above say for a type checker."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    blocks = (node.body for node in tree.body if isinstance(node, ast.If))
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name: (f"{__name__}.{node.module}", alias.name)
        for node in imports
        for alias in node.names
    }


if not TYPE_CHECKING:  # a checker would take any name then

    def __getattr__(name: str) -> object:
        """Load a public name from its file."""
        if name not in _homes():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, there = _homes()[name]
        return getattr(importlib.import_module(module), there)
