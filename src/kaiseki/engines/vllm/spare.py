"""Spares vLLM's block manager the calls that change nothing, which pays for what Kaiseki's decisions cost.

vLLM asks it for blocks for every request in every step, and again to make full ones shareable. Between two
block boundaries neither does anything; that is known beforehand, and most steps of a decode lie there. Only
for models whose KV cache is of one kind, full attention; others keep vLLM's calls.
"""

from __future__ import annotations

from typing import Any

from kaiseki.engines.vllm import adapter


def spare_calls(manager: Any) -> None:
    """Put a look in front of `allocate_slots` and `cache_blocks` of a block manager, if it may have one."""
    one = adapter.only_full_attention(manager)
    if one is None:
        return
    blocks_of, cached_of, size = one.req_to_blocks, one.num_cached_block, int(one.block_size)
    longest, nothing, caching = (
        int(manager.max_model_len),
        manager.empty_kv_cache_blocks,
        manager.enable_caching,
    )
    allocate, cache = manager.allocate_slots, manager.cache_blocks

    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        if not args and len(kwargs) == 1:  # as vLLM asks for those that run
            ahead = kwargs.get("num_lookahead_tokens")
            held = blocks_of.get(request.request_id)
            if ahead is not None and held:
                end = request.num_computed_tokens + num_new_tokens
                full = min(end, request.num_tokens) // size
                covered = min(end + ahead, longest) <= len(held) * size
                if covered and (not caching or cached_of.get(request.request_id, 0) >= full):
                    return nothing
        return allocate(request, num_new_tokens, *args, **kwargs)

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if cached_of.get(request.request_id, 0) < num_computed_tokens // size:
            cache(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks
