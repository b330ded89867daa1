"""vLLM as a peer of `kaiseki bench engine`: run by vLLM's own Python, commands on stdin, answers on stdout.

Needs nothing but vLLM. One JSON document per line: `{"do": "open", "prompts": [[ids], …]}`,
`{"do": "step", "steps": n}`, `{"do": "prefill", "prompt": [ids]}`, `{"do": "close"}`; each is answered by
one line with `tokens` and `seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any


class VllmPeer:
    """An engine that computes only when told to."""

    def __init__(self, model: str, rows: int, tokens: int) -> None:
        from vllm import LLM

        self._engine = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=tokens,
            max_num_seqs=rows,
            max_num_batched_tokens=tokens,
            disable_log_stats=True,
        ).llm_engine
        self._tokens = tokens
        self._open: list[str] = []
        self._added = 0

    def open(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Begin sequences and compute their prompts and first tokens."""
        self._open = [self._add(prompt, self._tokens - len(prompt)) for prompt in prompts]
        started: set[str] = set()
        while len(started) < len(prompts):
            started.update(output.request_id for output in self._engine.step() if _new_tokens(output))
        return {"tokens": 0, "seconds": 0.0}

    def step(self, steps: int) -> dict[str, Any]:
        """Decode all sequences so many times."""
        tokens = 0
        begin = time.perf_counter()
        while tokens < steps * len(self._open):
            tokens += sum(_new_tokens(output) for output in self._engine.step())
        return {"tokens": tokens, "seconds": time.perf_counter() - begin}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Compute one prompt up to its first token."""
        begin = time.perf_counter()
        self._add(prompt, 1)
        while not sum(_new_tokens(output) for output in self._engine.step()):
            pass
        seconds = time.perf_counter() - begin
        self._settle()
        return {"tokens": len(prompt), "seconds": seconds}

    def close(self) -> dict[str, Any]:
        """End the sequences."""
        self._engine.abort_request(self._open)
        self._open = []
        self._settle()
        return {"tokens": 0, "seconds": 0.0}

    def _settle(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._added += 1
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        self._engine.add_request(str(self._added), {"prompt_token_ids": prompt}, params)
        return str(self._added)


def _new_tokens(output: Any) -> int:
    return sum(len(choice.token_ids) for choice in output.outputs)


def main() -> None:
    """Serve commands until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    args = parser.parse_args()
    # Whatever the library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = VllmPeer(args.model, args.rows, args.tokens)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        result = getattr(peer, command.pop("do"))(**command)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
