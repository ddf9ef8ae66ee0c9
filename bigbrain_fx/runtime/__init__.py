"""What a bundle runs on: copied into it verbatim.

It imports torch and safetensors, and nothing of bigbrain-fx. Names are loaded when they are first
used: `runtime.commits` imports no torch, so that a supervisor without it can use it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from . import (
    command_line as command_line,  # before any code of the user's is imported
    launcher as launcher,  # before anything that takes long is
)

if TYPE_CHECKING:
    from .bundle import Bundle as Bundle
    from .channel import Channel as Channel
    from .commits import (
        ASIDE as ASIDE,
        BrokenError as BrokenError,
        CommitError as CommitError,
        Loaded as Loaded,
        Record as Record,
        about_of as about_of,
        committed as committed,
        first_loadable as first_loadable,
        graph_hash as graph_hash,
        load_shard as load_shard,
        open_generation as open_generation,
        warn_of_others as warn_of_others,
        write_record as write_record,
        write_shard as write_shard,
    )
    from .data import (
        Splitting as Splitting,
        Stream as Stream,
        filled_up as filled_up,
        mean_loss as mean_loss,
        share_of as share_of,
    )
    from .deferred import (
        Conv1d as Conv1d,
        Conv2d as Conv2d,
        Conv3d as Conv3d,
        ConvTranspose1d as ConvTranspose1d,
        ConvTranspose2d as ConvTranspose2d,
        ConvTranspose3d as ConvTranspose3d,
        DeferredError as DeferredError,
        DeferringDevice as DeferringDevice,
        Embedding as Embedding,
        Linear as Linear,
    )
    from .device import Device as Device, Training as Training, adamw as adamw
    from .disk import Disk as Disk, locked as locked
    from .gradients import clipped as clipped, norm as norm
    from .group import (
        added as added,
        all_gather as all_gather,
        all_reduce as all_reduce,
        copy_to_group as copy_to_group,
        joined as joined,
        largest as largest,
        own_part as own_part,
        part_of_whole as part_of_whole,
    )
    from .hooks import Hooks as Hooks
    from .image import (
        FORMAT as FORMAT,
        TensorEntry as TensorEntry,
        layout_of as layout_of,
        read_layout as read_layout,
    )
    from .infer import (
        Inference as Inference,
        InferenceDevice as InferenceDevice,
        infer_in_process as infer_in_process,
        infer_main as infer_main,
    )
    from .kept import (
        AssumptionError as AssumptionError,
        assume as assume,
        assume_not as assume_not,
        flat as flat,
        part_of as part_of,
    )
    from .local import Hub as Hub, LocalTransport as LocalTransport
    from .loss_scale import are_finite as are_finite, unscaled as unscaled
    from .malloc import keep_freed_memory as keep_freed_memory
    from .modules import (
        Region as Region,
        Stage as Stage,
        Tensors as Tensors,
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
    from .optimizer_state import (
        StateError as StateError,
        optimizer_facts as optimizer_facts,
        optimizer_tensors as optimizer_tensors,
        restore_optimizer as restore_optimizer,
    )
    from .own_lines import Shell as Shell, forward_of as forward_of
    from .promises import AgainError as AgainError, MakingAgain as MakingAgain, again as again
    from .rates import LearningRates as LearningRates
    from .records import read_records as read_records
    from .rendezvous import join as join, leave_together as leave_together, own_device as own_device
    from .replicas import bucket_channels as bucket_channels
    from .rows import RowStream as RowStream
    from .stores import HostRoom as HostRoom, StoredState as StoredState, StoreError as StoreError
    from .train import (
        example_batches as example_batches,
        main as main,
        run_in_process as run_in_process,
    )
    from .transport import Transport as Transport
    from .weights import OwnWeights as OwnWeights, WeightsError as WeightsError

_HOMES = {
    "gradients": "clipped norm",
    "bundle": "Bundle",
    "channel": "Channel",
    "commits": "ASIDE BrokenError CommitError Loaded Record about_of committed first_loadable "
    "graph_hash load_shard open_generation warn_of_others write_record write_shard",
    "data": "Splitting Stream filled_up mean_loss share_of",
    "deferred": "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d "
    "DeferredError DeferringDevice Embedding Linear",
    "device": "Device Training adamw",
    "disk": "Disk locked",
    "group": "added all_gather all_reduce copy_to_group joined largest own_part part_of_whole",
    "hooks": "Hooks",
    "image": "TensorEntry FORMAT layout_of read_layout",
    "infer": "Inference InferenceDevice infer_in_process infer_main",
    "kept": "AssumptionError assume assume_not flat part_of",
    "local": "Hub LocalTransport",
    "malloc": "keep_freed_memory",
    "modules": "Region Stage Tensors buffer parameter reseed",
    "named_facts": "UnlikeFactsError joined_facts parameter_of part_of_facts",
    "network": "NetworkTransport",
    "optimizer_state": "StateError optimizer_facts optimizer_tensors restore_optimizer",
    "own_lines": "Shell forward_of",
    "records": "read_records",
    "replicas": "bucket_channels",
    "rendezvous": "join leave_together own_device",
    "loss_scale": "are_finite unscaled",
    "promises": "AgainError MakingAgain again",
    "rates": "LearningRates",
    "rows": "RowStream",
    "stores": "HostRoom StoreError StoredState",
    "train": "example_batches main run_in_process",
    "transport": "Transport",
    "weights": "OwnWeights WeightsError",
}
_HOME = {name: file for file, names in _HOMES.items() for name in names.split()}


if not TYPE_CHECKING:  # a checker would take any name then

    def __getattr__(name: str) -> object:
        """Load a public name from its file."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
