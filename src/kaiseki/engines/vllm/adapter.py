"""All of vLLM that Kaiseki touches: names, supported versions, and small functions over both.

No other module of this package imports vLLM, save the scheduler for its base class. What is used by name
only is listed in `RELIED_ON`; a test looks each of them up in the installed version.
"""

from __future__ import annotations

import time
from typing import Any

import vllm
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request, RequestStatus

__all__ = ["AsyncScheduler", "Request", "RequestQueue", "RequestStatus", "Scheduler", "create_request_queue"]

SUPPORTED = {"0.32": "0.32.0"}
"""Minor versions that work, and the release of each that the tests ran with."""

RELIED_ON: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.sched.scheduler.Scheduler": (
        "schedule",
        "update_from_output",
        "add_request",
        "finish_requests",
        "_preempt_request",
        "_free_request",
        "_reserve_prefill_lookahead",
        "_enqueue_waiting_request",
        "_handle_blocked_waiting_request",
        "_is_blocked_waiting_status",
        "_holds_kv_blocks",
        "_update_after_schedule",
        "_update_request_with_output",
    ),
    "a scheduler": (
        "running",
        "waiting",
        "kv_holding_waiting",
        "requests",
        "policy",
        "max_num_running_reqs",
        "max_num_active_reqs",
        "max_num_scheduled_tokens",
        "max_model_len",
        "num_spec_tokens",
        "num_prefill_lookahead",
        "block_size",
        "lora_config",
        "vllm_config",
        "parallel_config",
        "scheduler_config",
        "kv_cache_config",
        "kv_cache_manager",
        "grammar_compile_error_reqs",
        "reset_preempted_req_ids",
    ),
    "a block manager": (
        "coordinator",
        "block_pool",
        "get_computed_blocks",
        "allocate_slots",
        "cache_blocks",
        "empty_kv_cache_blocks",
        "enable_caching",
        "max_model_len",
    ),
    "a coordinator": ("single_type_managers",),
    "a block manager of one kind": ("req_to_blocks", "num_cached_block", "block_size"),
    "a block pool": ("get_num_free_blocks", "num_gpu_blocks", "hash_block_size"),
    "a block": ("ref_cnt", "is_null"),
    "a request": (
        "request_id",
        "status",
        "priority",
        "num_tokens",
        "num_prompt_tokens",
        "num_output_tokens",
        "num_computed_tokens",
        "num_stale_output_tokens",
        "drop_stale_output",
        "max_tokens",
        "sampling_params",
        "pooling_params",
        "lora_request",
        "block_hashes",
        "is_finished",
    ),
    "vllm.sampling_params.SamplingParams": ("extra_args", "min_tokens", "ignore_eos"),
    "vllm.v1.core.sched.output.SchedulerOutput": (
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
    ),
    "vllm.v1.outputs.ModelRunnerOutput": ("req_ids", "sampled_token_ids"),
    "vllm.v1.request.RequestStatus": (
        "WAITING",
        "RUNNING",
        "PREEMPTED",
        "FINISHED_STOPPED",
        "FINISHED_LENGTH_CAPPED",
        "FINISHED_ABORTED",
        "FINISHED_ERROR",
    ),
    "vllm.config.VllmConfig": ("additional_config", "instance_id", "max_concurrent_batches"),
}
"""Names by what they belong to: importable things by their path, others by what they are to us."""


class UnsupportedVersion(RuntimeError):
    """This vLLM is not one that Kaiseki was tested with."""


def check_version(version: str = vllm.__version__) -> None:
    """Refuse to run in a vLLM whose insides may differ.

    Raises:
        UnsupportedVersion: with the versions that work.
    """
    minor = ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])
    if minor not in SUPPORTED:
        tested = ", ".join(f"{name}.x (tested with {exact})" for name, exact in SUPPORTED.items())
        raise UnsupportedVersion(
            f"vLLM {version}: this version of Kaiseki runs inside {tested}. Install one of these, or leave "
            "--scheduler-cls out to run vLLM's own scheduler."
        )


def schedules_tokens(scheduler: Any) -> bool:
    """Whether its requests are generations, which is what Kaiseki schedules (pooling models are not)."""
    config = scheduler.vllm_config.model_config
    return not (config.runner_type == "pooling" or config.is_diffusion or scheduler.is_encoder_decoder)


def groups_of(scheduler: Any) -> list[dict[str, list[Any]]]:
    """For each kind of KV cache, the blocks that requests hold, by request id."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return [manager.req_to_blocks for manager in managers]


def only_full_attention(manager: Any) -> Any:
    """The one block manager of one kind, if there is only that, full attention, hashed block by block."""
    one, *others = manager.coordinator.single_type_managers
    plain = type(one) is FullAttentionManager and one.block_size == manager.block_pool.hash_block_size
    return one if plain and not others else None


def is_running(request: Any) -> bool:
    """Whether a request is in the batch."""
    return bool(request.status == RequestStatus.RUNNING)


def finished_at_length(request: Any) -> bool:
    """Whether it ended for its length, and not by a stop token."""
    return bool(request.status == RequestStatus.FINISHED_LENGTH_CAPPED)


def completed(request: Any) -> bool:
    """Whether it ended with its output, rather than by an error or a client's leave."""
    return request.status not in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)


def aborted(request: Any) -> bool:
    """Whether its client left."""
    return bool(request.status == RequestStatus.FINISHED_ABORTED)


def extra_args(request: Any) -> dict[str, Any]:
    """What came in `vllm_xargs`."""
    params = request.sampling_params
    return (params.extra_args or {}) if params is not None else {}


def least_tokens(request: Any) -> int:
    """Output tokens that it will produce for certain, at least 1."""
    params = request.sampling_params
    if params is None:
        return 1
    return int(request.max_tokens if params.ignore_eos else max(1, params.min_tokens))


def drafts(output: Any) -> int:
    """Draft tokens among the tokens of a step."""
    return sum(map(len, output.scheduled_spec_decode_tokens.values()))


def unpaused(scheduler: Any) -> bool:
    """Whether everything may run; while vLLM is paused, it alone decides."""
    return bool(scheduler.pause_state == PauseState.UNPAUSED)


def by_arrival(request: Any) -> tuple[bool, float]:
    """The order of vLLM's own queue: those that ran already first, then who came first."""
    return request.status != RequestStatus.PREEMPTED, request.arrival_time


def waited_ns(request: Any) -> int:
    """How long ago the API server got the request, ns; longer than an hour is a clock that was set."""
    return int(min(max(time.time() - request.arrival_time, 0.0), 3600.0) * 1e9)


def open_requests(scheduler: Any) -> int:
    """Requests that run or wait, leaving out those that ended and whose blocks are still being read."""
    running, waiting = scheduler.get_request_counts()
    return int(running) + int(waiting)


def device() -> str:
    """Name of the card, empty on a CPU."""
    return "" if current_platform.is_cpu() else str(current_platform.get_device_name())
