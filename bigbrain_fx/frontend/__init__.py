"""Model file or nn.Module -> Graph; the only package that knows torch.export and torch.fx.

The package knows nothing of devices, placements or emitted code. Importing the package does not
import torch: `capture_file` works through a child process; names that need torch are loaded when
first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigbrain_fx.core import door

if TYPE_CHECKING:
    from bigbrain_fx.frontend.answers import read_answers as read_answers
    from bigbrain_fx.frontend.cached.model import with_cache as with_cache
    from bigbrain_fx.frontend.cached.module import Cached as Cached
    from bigbrain_fx.frontend.cached.trial import require_same as require_same
    from bigbrain_fx.frontend.capture_cache.known import is_known_text as is_known_text
    from bigbrain_fx.frontend.capture_cache.table import NO_CACHE as NO_CACHE
    from bigbrain_fx.frontend.capture_service import CaptureService as CaptureService
    from bigbrain_fx.frontend.child import Requests as Requests, serve_captures as serve_captures
    from bigbrain_fx.frontend.client import (
        BEGINNING as BEGINNING,
        Child as Child,
        Message as Message,
        Task as Task,
        child_environment as child_environment,
        told_error as told_error,
    )
    from bigbrain_fx.frontend.contract import (
        marks_of as marks_of,
        seeded as seeded,
        training_of as training_of,
    )
    from bigbrain_fx.frontend.device_dependence import told_of_gpus as told_of_gpus
    from bigbrain_fx.frontend.file_checks import (
        captured_with_numbers as captured_with_numbers,
        require_steady_file as require_steady_file,
    )
    from bigbrain_fx.frontend.first_batches import (
        BatchReading as BatchReading,
        further_batches as further_batches,
        keeping_smaller as keeping_smaller,
    )
    from bigbrain_fx.frontend.forked import (
        Answering as Answering,
        Ends as Ends,
        Fork as Fork,
        Say as Say,
        answer as answer,
        apart as apart,
    )
    from bigbrain_fx.frontend.later_batches import (
        LaterBatches as LaterBatches,
        require_steady as require_steady,
    )
    from bigbrain_fx.frontend.lengths import with_lengths as with_lengths
    from bigbrain_fx.frontend.location import (
        HF as HF,
        hf_location as hf_location,
        is_hf as is_hf,
        is_onnx as is_onnx,
        resolved as resolved,
    )
    from bigbrain_fx.frontend.micro_batches.effect import MicroBatchEffect as MicroBatchEffect
    from bigbrain_fx.frontend.micro_batches.loss_count import counts_by_row as counts_by_row
    from bigbrain_fx.frontend.micro_batches.measure import (
        Training as Training,
        later_effect as later_effect,
        micro_batch_effect as micro_batch_effect,
        with_divided as with_divided,
    )
    from bigbrain_fx.frontend.modelfile import (
        ModelFile as ModelFile,
        eval_note as eval_note,
        eval_parts_kept as eval_parts_kept,
        eval_parts_note as eval_parts_note,
        load_model_file as load_model_file,
        module_name as module_name,
    )
    from bigbrain_fx.frontend.onnx import load_onnx as load_onnx
    from bigbrain_fx.frontend.opaque_step.own_loop import OwnLoop as OwnLoop
    from bigbrain_fx.frontend.opaque_step.user_step import (
        Call as Call,
        UserStep as UserStep,
        call_of as call_of,
    )
    from bigbrain_fx.frontend.plain_entries import (
        Types as Types,
        numbers_in as numbers_in,
        with_number_inputs as with_number_inputs,
        with_numbers as with_numbers,
    )
    from bigbrain_fx.frontend.quantised import quantise as quantise
    from bigbrain_fx.frontend.randomness import draw_places as draw_places, place_name as place_name
    from bigbrain_fx.frontend.refusal import TOO_LARGE as TOO_LARGE
    from bigbrain_fx.frontend.room import Room as Room, require_room as require_room
    from bigbrain_fx.frontend.service import (
        Replies as Replies,
        memory_error as memory_error,
        require_folder as require_folder,
    )
    from bigbrain_fx.frontend.session import (
        CHILD as CHILD,
        CaptureSession as CaptureSession,
        ModelFacts as ModelFacts,
        TrialEndedError as TrialEndedError,
        ask_rules as ask_rules,
        capture_file as capture_file,
    )
    from bigbrain_fx.frontend.tracing.batches.row_independence import rows_mixed as rows_mixed
    from bigbrain_fx.frontend.tracing.batches.uneven import (
        pads as pads,
        require_padding as require_padding,
        require_rows as require_rows,
    )
    from bigbrain_fx.frontend.tracing.blank import fill as fill
    from bigbrain_fx.frontend.tracing.captured import Captured as Captured
    from bigbrain_fx.frontend.tracing.check import (
        CheckRun as CheckRun,
        Results as Results,
        copied as copied,
        unit_of as unit_of,
    )
    from bigbrain_fx.frontend.tracing.executor.graph_executor import run_graph as run_graph
    from bigbrain_fx.frontend.tracing.executor.shard_rule_trial import (
        failed_rules as failed_rules,
        in_float64 as in_float64,
        try_rule as try_rule,
        widened as widened,
    )
    from bigbrain_fx.frontend.tracing.executor.tensor_parallel import (
        run_members as run_members,
        taken as taken,
    )
    from bigbrain_fx.frontend.tracing.executor.tolerance import (
        allowed as allowed,
        differences as differences,
        distance as distance,
        relative as relative,
    )
    from bigbrain_fx.frontend.tracing.export import (
        uncompiled as uncompiled,
        without_gc as without_gc,
    )
    from bigbrain_fx.frontend.tracing.optimizers.as_data import (
        GroupedOptimizer as GroupedOptimizer,
        for_devices as for_devices,
    )
    from bigbrain_fx.frontend.tracing.optimizers.memory import optimizer_facts as optimizer_facts
    from bigbrain_fx.frontend.tracing.optimizers.per_device import (
        require_divided as require_divided,
        require_made_per_device as require_made_per_device,
    )
    from bigbrain_fx.frontend.tracing.plain import Plain as Plain, same_numbers as same_numbers
    from bigbrain_fx.frontend.tracing.state.changed_module import Copied as Copied
    from bigbrain_fx.frontend.tracing.state.number_inputs import standing_in as standing_in
    from bigbrain_fx.frontend.tracing.state.read_names import (
        read_names as read_names,
        reads_kept as reads_kept,
    )
    from bigbrain_fx.frontend.tracing.step import (
        Route as Route,
        Step as Step,
        modes_kept as modes_kept,
        route as route,
        settle as settle,
        without_fast_path as without_fast_path,
    )
    from bigbrain_fx.frontend.tracing.trace import capture as capture
    from bigbrain_fx.frontend.translation.batch import (
        graph_inputs as graph_inputs,
        mapped as mapped,
        named_tensors as named_tensors,
        take_apart as take_apart,
    )
    from bigbrain_fx.frontend.translation.kept import LEAF as LEAF, LOSS as LOSS
    from bigbrain_fx.frontend.translation.leaf import (
        apart_from_here as apart_from_here,
        leaf as leaf,
        leaf_paths as leaf_paths,
    )
    from bigbrain_fx.frontend.translation.oracle import (
        answers_in as answers_in,
        asked_at as asked_at,
    )
    from bigbrain_fx.frontend.translation.sources import where as where
    from bigbrain_fx.frontend.user_cut import (
        cut as cut,
        effect_of_parts as effect_of_parts,
        part_counts as part_counts,
        with_parts as with_parts,
    )
else:
    __getattr__ = door(__name__)
