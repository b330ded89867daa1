"""vLLM's scheduler as a peer of `kaiseki bench decide`: run by vLLM's own Python, commands on stdin.

Needs nothing but vLLM, and no model: a made-up configuration is enough to make a scheduler. After
`{"ready": true}`, each `{"do": "slots", "slots": n}` is answered by one line with the thread CPU time of
n calls of `schedule()` and `update_from_output()`, and per arriving request of making it and `add_request`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 40_960,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}
STEP_TOKENS = 8192
BLOCKS = 300_000
STOP, GO_ON = 2, 7
"""Token ids: one ends a request, the other does not."""
WARM_UP = 10
MOST_STEPS = 10_000
CLOCK = time.thread_time_ns


class SchedulerPeer:
    """A scheduler with the priority policy and prefix caching, under a steady load."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        self._args = args
        self._added = 0
        self._random = random.Random(0)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(args.page, sha256)
        self._scheduler = _scheduler(args)
        for _ in range(args.running):
            self._scheduler.add_request(self._request(0))
        self._prefill()
        for _ in range(args.waiting):
            self._scheduler.add_request(self._request(self._random.randrange(1, 100)))
        gc.collect()
        gc.freeze()
        self.slots(WARM_UP)

    def slots(self, slots: int) -> dict[str, Any]:
        """So many slots, each with arrivals and with as many requests that end by a stop token."""
        figures: dict[str, Any] = {"schedule_us": [], "update_us": [], "submit_us": []}
        many = self._args.churn
        for _ in range(slots):
            prompts = [self._prompt() for _ in range(many)]
            begin = CLOCK()
            for prompt in prompts:
                self._scheduler.add_request(self._request(self._random.randrange(1, 100), prompt))
            added = CLOCK()
            out = self._scheduler.schedule()
            scheduled = CLOCK()
            result = self._result(out, many)
            made = CLOCK()
            self._scheduler.update_from_output(out, result)
            ended = CLOCK()
            figures["submit_us"].append((added - begin) / 1e3 / max(many, 1))
            figures["schedule_us"].append((scheduled - added) / 1e3)
            figures["update_us"].append((ended - made) / 1e3)
        from vllm import __version__

        waiting = self._scheduler.get_request_counts()[1]
        name = f"vLLM {__version__}, {type(self._scheduler).__name__}"
        return figures | {"name": name, "running": len(self._scheduler.running) + many, "waiting": waiting}

    def _prefill(self) -> None:
        s = self._scheduler
        for _ in range(MOST_STEPS):
            out = s.schedule()
            s.update_from_output(out, self._result(out, 0))
            if len(s.running) == self._args.running and not any(r.is_prefill_chunk for r in s.running):
                return
        raise RuntimeError(f"{len(s.running)} of {self._args.running} requests run at once")

    def _prompt(self) -> list[int]:
        return [self._random.randrange(1000, 40_000) for _ in range(self._args.prompt)]

    def _request(self, priority: int, prompt: list[int] | None = None) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._added += 1
        return Request(
            request_id=str(self._added),
            prompt_token_ids=prompt or self._prompt(),
            sampling_params=SamplingParams(
                max_tokens=self._args.output, temperature=0.0, stop_token_ids=[STOP]
            ),
            pooling_params=None,
            priority=priority,
            block_hasher=self._hasher,
        )

    def _result(self, out: Any, stops: int) -> Any:
        """What a model would have given: a token for whoever samples, a stop for some."""
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(out.num_scheduled_tokens)
        requests = self._scheduler.requests
        tokens = [[] if requests[i].is_prefill_chunk else [GO_ON] for i in ids]
        sampling = [k for k, one in enumerate(tokens) if one]
        for k in self._random.sample(sampling, min(stops, len(sampling))):
            tokens[k] = [STOP]
        places = {i: k for k, i in enumerate(ids)}
        return ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=tokens)


def _scheduler(args: argparse.Namespace) -> Any:
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        config = EngineArgs(
            model=folder,
            dtype="float32",
            max_model_len=CONFIG["max_position_embeddings"],
            max_num_seqs=args.running,
            max_num_batched_tokens=STEP_TOKENS,
            scheduling_policy="priority",
            block_size=args.page,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
        ).create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=args.page, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=args.page,
        hash_block_size=args.page,
        include_finished_set=False,
        log_stats=True,
    )


def main() -> None:
    """Serve commands until stdin ends."""
    parser = argparse.ArgumentParser()
    for name in ("running", "waiting", "churn", "prompt", "output", "page"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    # Whatever the library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = SchedulerPeer(args)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        result = getattr(peer, command.pop("do"))(**command)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
