"""vLLM's scheduler with either class, a made-up model and a virtual clock: steps take what a formula says."""

from __future__ import annotations

import json
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kaiseki.bench.vllm_scheduler_peer import CONFIG
from kaiseki.engines.clock import VirtualClock
from kaiseki.engines.vllm import KaisekiScheduler
from kaiseki.engines.vllm.witness import Witness

MS = 1_000_000
BLOCK = 16
STOP = 2


@dataclass
class Told:
    """What the client of a request saw; times in ns."""

    arrived_ns: int
    times_ns: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    prompt: int = 0

    @property
    def ttft_ns(self) -> int:
        return self.times_ns[0] - self.arrived_ns

    @property
    def gaps_ns(self) -> list[int]:
        return [b - a for a, b in zip(self.times_ns, self.times_ns[1:], strict=False)]


def token(request_id: str, position: int) -> int:
    """What the model samples at a position: a function of both alone, so that any schedule gives the same."""
    return 1000 + (sum(request_id.encode()) * 7919 + position * 104729) % 30_000


class Kept(Witness):
    """Keeps what the core traces of its decisions."""

    def __init__(self, records: list[Any]) -> None:
        self._records = records

    def decided(self, core: Any, decision: Any, records: Any, cutoffs: Any, now: int) -> None:
        self._records += list(records.copy())


class Rig:
    """One scheduler and its steps, with `depth` of them in flight beyond the one that runs.

    Args:
        kaiseki: settings, or None for vLLM's own scheduler.
        step_ns: time of a step of so many decodes and prompt tokens.
        options: of `EngineArgs`.
    """

    def __init__(
        self,
        kaiseki: dict[str, Any] | None,
        *,
        blocks: int = 4096,
        depth: int = 1,
        step_ns: Callable[[int, int], float] = lambda decodes, prompt: (
            10 * MS + 0.05 * MS * (decodes + prompt)
        ),
        **options: Any,
    ) -> None:
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        given = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 4096}
        given |= {"additional_config": {"kaiseki": kaiseki or {}}} | options
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(CONFIG))
            config = EngineArgs(
                model=folder,
                dtype="float32",
                block_size=BLOCK,
                enable_prefix_caching=True,
                skip_tokenizer_init=True,
                async_scheduling=depth > 0,
                **given,
            ).create_engine_config()
        config.scheduler_config.async_scheduling = depth > 0  # which vLLM switches off on a CPU
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.clock = VirtualClock(time.monotonic_ns())
        cls = AsyncScheduler
        if kaiseki is not None:
            self.records: list[Any] = []
            made: dict[str, Any] = {"_clock": self.clock}
            if "recorder" not in kaiseki:
                made["_witness_of"] = lambda scheduler, core: Kept(self.records)
            cls = type("Timed", (KaisekiScheduler,), made)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        self.scheduler: Any = cls(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            include_finished_set=False,
            log_stats=True,
        )
        self.told: dict[str, Told] = {}
        self.steps: list[dict[str, int]] = []
        self.stops: dict[str, int] = {}
        self._step_ns, self._depth = step_ns, depth
        self._pending: list[tuple[Any, Any, int]] = []
        self._free_ns = self.clock.now_ns()

    @property
    def core(self) -> Any:
        return self.scheduler._books.core

    def add(self, name: str, prompt: int | list[int] = 100, output: int = 20, **extra: Any) -> None:
        """A request arrives; `extra` becomes its `vllm_xargs`, with `kaiseki_` put before each name."""
        ids = (
            prompt
            if isinstance(prompt, list)
            else [1000 + (len(name) * 31 + i * 7) % 9000 for i in range(prompt)]
        )
        if not isinstance(prompt, list):
            ids[0] = 1000 + sum(name.encode()) % 9000  # no prefix in common
            ids[1] = 1000 + zlib.crc32(name.encode()) % 9000
        self.told[name] = Told(self.clock.now_ns(), prompt=len(ids))
        params = SamplingParams(
            max_tokens=output,
            temperature=0.0,
            stop_token_ids=[STOP],
            extra_args={f"kaiseki_{k}": v for k, v in extra.items()},
        )
        request = Request(
            request_id=name,
            prompt_token_ids=ids,
            sampling_params=params,
            pooling_params=None,
            priority=int(extra.get("priority", 0)),
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> dict[str, int]:
        """Schedule one step; take in the result of the oldest one if as many are in flight as may be."""
        out = self.scheduler.schedule()
        self.steps.append(dict(out.num_scheduled_tokens))
        samples = {i: self._sample(i) for i in out.num_scheduled_tokens}
        prompt = sum(n for n in out.num_scheduled_tokens.values() if n > 1)
        decodes = sum(n == 1 for n in out.num_scheduled_tokens.values())
        begin = max(self.clock.now_ns(), self._free_ns)
        self._free_ns = begin + round(self._step_ns(decodes, prompt)) if samples else begin
        self._pending.append((out, samples, self._free_ns))
        if len(self._pending) > self._depth:
            self._collect()
        return dict(out.num_scheduled_tokens)

    def _sample(self, name: str) -> list[int]:
        request = self.scheduler.requests[name]
        if request.is_prefill_chunk:
            return []
        position = request.num_computed_tokens - request.num_prompt_tokens
        return [STOP if self.stops.get(name) == position else token(name, position)]

    def _collect(self) -> None:
        out, samples, ended = self._pending.pop(0)
        self.clock.advance_to(ended)
        ids = list(reversed(samples))  # a runner's batch has an order of its own
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={i: k for k, i in enumerate(ids)},
            sampled_token_ids=[samples[i] for i in ids],
        )
        for outputs in self.scheduler.update_from_output(out, result).values():
            for one in outputs.outputs:
                told = self.told[one.request_id]
                told.tokens += one.new_token_ids
                told.times_ns += [self.clock.now_ns()] * len(one.new_token_ids)
                if one.finish_reason is not None:
                    told.finish = str(one.finish_reason)

    def run(self, most_steps: int = 20_000) -> None:
        """Until nothing is left."""
        for _ in range(most_steps):
            if not self.scheduler.has_requests() and not self._pending:
                return
            if self.scheduler.has_requests():
                self.step()
            else:
                self._collect()
        raise AssertionError(f"still {self.scheduler.get_request_counts()} after {most_steps} steps")

    def expected(self, name: str, output: int) -> list[int]:
        return [token(name, position) for position in range(output)]
