"""The embedded engine: decisions in, tokens out, on a model in this process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kaiseki.core.decision import Decision, StepResult
from kaiseki.core.protocols import Capabilities
from kaiseki.engines.embedded.attention import AttentionBackend
from kaiseki.engines.embedded.attention.cpu import CpuAttention
from kaiseki.engines.embedded.attention.cuda import CudaAttention
from kaiseki.engines.embedded.batch import BlockTables
from kaiseki.engines.embedded.checks import check_config, take_over
from kaiseki.engines.embedded.forward import pool_shape, warm_up
from kaiseki.engines.embedded.rows import RowState
from kaiseki.engines.embedded.steps import Step, StepRunner
from kaiseki.engines.embedded.text import TextCodec
from kaiseki.engines.embedded.threads import available_threads, share_threads
from kaiseki.engines.embedded.work import GenerationWork

SWAP_BYTES_PER_NS = 2.0
"""Of moves to and from host memory, GB/s, until some have been measured."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class EmbeddedEngine:
    """An `Engine` over a Hugging Face causal LM, its KV in blocks that the core's `KVSpace` hands out.

    With depth 1 a step runs while the next one is decided. All steps run in order on one worker thread,
    whatever the depth, since OpenMP keeps a pool of threads per calling thread.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        tables: BlockTables,
        blocks: int,
        block_tokens: int = 16,
        host_blocks: int = 0,
        threads: int | None = None,
        depth: int = 0,
        max_step_tokens: int = 8192,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Take over a model that is already built, in float32 or bfloat16; it stays on its device.

        Args:
            model: a `PreTrainedModel` with a language-model head; it is made over, for this engine alone.
            tokenizer: the model's `PreTrainedTokenizerBase`.
            tables: block tables of rows, asked when a decision is executed.
            blocks: blocks in the KV pool.
            block_tokens: tokens per block.
            host_blocks: blocks of host memory, for KV of requests that were stopped.
            threads: threads to compute on; all CPUs this process may use by default.
            depth: 0, or 1 to run a step while the next is decided.
            max_step_tokens: most tokens in one step, as declared to the scheduler.
            clock: nanoseconds; the clock of results.

        Raises:
            UnsupportedModel: the model needs what paged attention here does not do.
            ValueError: depth or element type out of range.
        """
        if depth not in (0, 1):
            raise ValueError(f"depth must be 0 or 1, not {depth}")
        if blocks < 2:
            raise ValueError(f"the pool needs at least 2 blocks, not {blocks}")
        check_config(model.config)
        threads = threads or available_threads()
        self.codec = TextCodec(tokenizer)
        self.config = model.config
        self.shape = pool_shape(
            model.config, blocks, block_tokens, next(model.parameters()).dtype, host_blocks
        )
        self.eos = eos_tokens(model, tokenizer)
        self._rows: dict[int, RowState] = {}
        self._tables = tables
        self._results: deque[Future[StepResult]] = deque()
        self._worker = ThreadPoolExecutor(1, "kaiseki-engine", share_threads, (threads,))
        backend = self._backend(model, threads)
        self._runner = self._worker.submit(take_over, model, backend, block_tokens).result()
        self._steps = StepRunner(self._runner, self.codec, clock)
        self._capabilities = Capabilities(
            depth=depth,
            max_context_tokens=int(model.config.max_position_embeddings),
            max_step_tokens=max_step_tokens,
            adapter_slots=0,  # it runs the base model only
            swap_block_ns=int(self.shape.bytes / blocks / SWAP_BYTES_PER_NS) if host_blocks else 0,
        )

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        tables: BlockTables,
        blocks: int,
        dtype: str = "float32",
        device: str = "cpu",
        block_tokens: int = 16,
        host_blocks: int = 0,
        threads: int | None = None,
        depth: int = 0,
        max_step_tokens: int = 8192,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> EmbeddedEngine:
        """Load a Hugging Face model folder; nothing is fetched from anywhere. See `__init__`.

        Args:
            dtype: "float32" or "bfloat16".
            device: "cpu", or a CUDA device, which needs FlashInfer and bfloat16.

        Raises:
            UnsupportedModel: the model needs what paged attention here does not do.
            OSError, ValueError: the folder is not a complete causal language model.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype}")
        check_config(AutoConfig.from_pretrained(folder, local_files_only=True))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], local_files_only=True)
        return cls(
            model.to(device),
            AutoTokenizer.from_pretrained(folder, local_files_only=True),
            tables=tables,
            blocks=blocks,
            block_tokens=block_tokens,
            host_blocks=host_blocks,
            threads=threads,
            depth=depth,
            max_step_tokens=max_step_tokens,
            clock=clock,
        )

    def _backend(self, model: Any, threads: int) -> AttentionBackend:
        """Attention for the device the model is on."""
        device = next(model.parameters()).device
        return (
            CpuAttention(self.shape, threads) if device.type == "cpu" else CudaAttention(self.shape, device)
        )

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine`."""
        return self._capabilities

    def open(self, row: int, work: GenerationWork) -> None:
        """See `Engine`.

        Raises:
            ValueError: the prompt is empty.
        """
        self._rows[row] = RowState(work, self.codec, self.eos)

    def close(self, row: int) -> None:
        """See `Engine`."""
        self._rows.pop(row, None)

    def execute(self, decision: Decision) -> None:
        """See `Engine`."""
        self._results.append(self.start(decision))

    def start(self, decision: Decision) -> Future[StepResult]:
        """Like `execute`, for who does not want to wait in `collect`.

        The future's callbacks run on the worker thread, before the next step begins.
        """
        step = Step.snapshot(decision, self._rows, self._tables)
        return self._worker.submit(self._steps.run, step)

    def collect(self) -> StepResult:
        """See `Engine`."""
        return self._results.popleft().result()

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return self.codec.encode(text)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation; see `TextCodec.render_chat`."""
        return self.codec.render_chat(messages)

    def warm_up(self, tokens: int = 256) -> None:
        """Compile kernels and touch memory, so that the first requests are not slow.

        Runs prefills of up to `tokens` tokens and decodes in the pool's first blocks, which no request
        may hold yet.
        """
        self._worker.submit(warm_up, self._runner, tokens).result()

    def shutdown(self) -> None:
        """Wait for steps in flight and end the worker thread."""
        self._worker.shutdown()


def eos_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an output: the generation settings' and the tokenizer's."""
    found: set[int] = set()
    settings = getattr(model, "generation_config", None)
    for ids in (getattr(settings, "eos_token_id", None), tokenizer.eos_token_id):
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)
