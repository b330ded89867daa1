"""What the block pool promises, one small case each. Pages have 4 tokens unless said otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from kaiseki.core.protocols import KVSpace, OutOfBlocks
from kaiseki.memory import BlockPool, chain_hashes


def i32(*values):
    return np.array(values, np.int32)


def fences(*values):
    return np.array(values, np.int64)


NOW = fences(-1)
TEXT = list(range(100))
OTHER = TEXT[:8] + [7] * 92


def pool_of(total, **options):
    return BlockPool(total, 4, **options)


def compute(pool, row, tokens, end=None):
    """Register a row that computes `tokens` from its cached prefix on; returns what was cached."""
    end = len(tokens) if end is None else end
    pool.register(row, chain_hashes(tokens, 4))
    (have,) = pool.attach(i32(row), i32(end - 1)).tolist()
    pool.reserve(i32(row), i32(have), i32(end))
    pool.commit(i32(row), i32(end))
    pool.check()
    return have


def cached(pool, tokens, row=90):
    """Tokens of a text that are in the cache."""
    pool.register(row, chain_hashes(tokens, 4))
    (have,) = pool.cached_tokens(i32(row), i32(len(tokens)))[:, 0].tolist()
    pool.forget(row)
    return have


def blocks_of(pool, row, end):
    return pool.tables(i32(row), i32(end))[0].tolist()


def test_it_is_a_kv_space():
    space: KVSpace = pool_of(3)
    assert (space.block_tokens, space.total_blocks, space.free_blocks(), space.live_blocks()) == (4, 3, 3, 0)
    assert BlockPool(3).block_tokens == 16


@pytest.mark.parametrize("shape", [(0, 4, 1), (3, 0, 1), (3, 4, 0)])
def test_a_pool_needs_blocks_of_tokens_and_rows(shape):
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(*shape)


class TestGrowth:
    def test_takes_a_block_when_a_page_is_full(self):
        pool = pool_of(8)
        compute(pool, 0, TEXT[:7])
        need = [pool.growth_need(i32(0), i32(7), i32(end))[0] for end in (7, 8, 9, 12, 13)]
        assert need == [0, 0, 1, 1, 2]
        assert pool.reserve(i32(0), i32(7), i32(13)).shape == (0, 2)
        assert (pool.free_blocks(), pool.live_blocks()) == (4, 4)
        assert len(set(blocks_of(pool, 0, 13))) == 4

    def test_refuses_more_than_is_free_and_takes_nothing(self):
        pool = pool_of(3)
        for row in (0, 1):
            pool.register(row, ())
        with pytest.raises(OutOfBlocks):
            pool.reserve(i32(0, 1), i32(0, 0), i32(8, 8))
        assert pool.free_blocks() == 3
        pool.reserve(i32(0, 1), i32(0, 0), i32(8, 4))
        assert pool.free_blocks() == 0
        pool.check()

    def test_tables_are_a_snapshot_padded_with_zeros(self):
        pool = pool_of(8)
        for row, size in ((0, 3), (1, 9)):
            compute(pool, row, OTHER[row : row + size])
        table = pool.tables(i32(1, 0), i32(9, 3))
        assert table.dtype == np.int32 and table.shape == (2, 3)
        assert table[1, 1:].tolist() == [0, 0]
        before = table.copy()
        pool.release(i32(0, 1), fences(-1, -1))
        compute(pool, 2, TEXT[50:80])
        assert (table == before).all()

    def test_padding_is_written(self, monkeypatch):
        pool = pool_of(8)
        for row, size in ((0, 3), (1, 9)):
            compute(pool, row, OTHER[row : row + size])
        monkeypatch.setattr(np, "empty", lambda shape, dtype: np.full(shape, 99, dtype))
        assert pool.tables(i32(1, 0), i32(9, 3))[1].tolist() == [blocks_of(pool, 0, 3)[0], 0, 0]

    def test_no_more_is_committed_than_there_are_blocks_for(self):
        pool = pool_of(8)
        pool.register(0, chain_hashes(TEXT, 4))
        pool.reserve(i32(0), i32(0), i32(4))
        pool.commit(i32(0), i32(100))
        pool.check()
        assert cached(pool, TEXT) == 4

    def test_a_table_is_not_made_up(self):
        pool = pool_of(8)
        compute(pool, 0, TEXT[:4])
        pool.register(1, ())
        for row, end in ((0, 5), (1, 1)):
            with pytest.raises(ValueError, match="does not hold"):
                pool.tables(i32(row), i32(end))
        assert pool.tables(i32(1, 0), i32(0, 0)).shape == (2, 0)


class TestReuse:
    def test_a_prefix_is_whole_pages_within_the_limit(self):
        pool = pool_of(16)
        compute(pool, 0, TEXT[:14])
        pool.register(1, chain_hashes(TEXT[:30], 4))
        found = [pool.cached_tokens(i32(1), i32(limit))[0].tolist() for limit in (-1, 0, 3, 4, 11, 12, 29)]
        assert found == [[0, 0], [0, 0], [0, 0], [4, 0], [8, 0], [12, 0], [12, 0]]
        assert pool.attach(i32(1), i32(11)).tolist() == [8]
        assert blocks_of(pool, 1, 8) == blocks_of(pool, 0, 8)
        assert pool.live_blocks() == 4
        assert (pool.stats().queried_tokens, pool.stats().hit_tokens) == (13 + 11, 8)

    def test_of_a_row_that_holds_blocks_what_is_computed_counts_and_nothing_is_free(self):
        pool = pool_of(16)
        pool.register(0, chain_hashes(TEXT[:12], 4))
        pool.reserve(i32(0), i32(0), i32(14))
        assert pool.cached_tokens(i32(0), i32(13)).tolist() == [[0, 0]]
        pool.commit(i32(0), i32(13))
        found = [pool.cached_tokens(i32(0), i32(limit))[0].tolist() for limit in (-1, 5, 13, 14)]
        assert found == [[0, 0], [5, 0], [13, 0], [13, 0]]

    def test_only_committed_pages_are_found(self):
        pool = pool_of(16)
        pool.register(0, chain_hashes(TEXT[:16], 4))
        pool.reserve(i32(0), i32(0), i32(16))
        assert cached(pool, TEXT[:16]) == 0
        pool.commit(i32(0), i32(11))
        assert cached(pool, TEXT[:16]) == 8
        pool.release(i32(0), NOW)
        assert cached(pool, TEXT[:16]) == 8
        assert pool.stats().cached_blocks == 2

    def test_a_text_that_parts_ways_shares_up_to_there(self):
        pool = pool_of(32)
        compute(pool, 0, TEXT[:16])
        assert compute(pool, 1, OTHER[:16]) == 8
        assert cached(pool, OTHER[:16]) == 16

    def test_released_pages_stay_until_blocks_are_needed(self):
        pool = pool_of(6)
        compute(pool, 0, TEXT[:16])
        pool.release(i32(0), NOW)
        assert (pool.free_blocks(), cached(pool, TEXT)) == (6, 16)
        pool.register(1, chain_hashes(TEXT[:16], 4))
        assert pool.cached_tokens(i32(1), i32(15)).tolist() == [[12, 3]]
        pool.attach(i32(1), i32(15))
        assert pool.free_blocks() == 3
        assert pool.cached_tokens(i32(1), i32(15)).tolist() == [[12, 0]]

    def test_of_two_rows_that_compute_one_page_the_first_is_shared(self):
        pool = pool_of(16)
        for row in (0, 1):
            pool.register(row, chain_hashes(TEXT[:12], 4))
        pool.reserve(i32(0, 1), i32(0, 0), i32(12, 12))
        pool.commit(i32(1, 0), i32(12, 12))
        pool.register(2, chain_hashes(TEXT[:12], 4))
        pool.attach(i32(2), i32(12))
        assert blocks_of(pool, 2, 12) == blocks_of(pool, 1, 12) != blocks_of(pool, 0, 12)
        pool.release(i32(0), NOW)
        assert pool.stats().cached_blocks == 0
        pool.check()

    @pytest.mark.parametrize("fence", [-1, 5])
    def test_what_follows_a_duplicate_is_found_after_release(self, fence):
        pool = pool_of(16)
        for row, text in ((0, TEXT[:8]), (1, OTHER[:20])):
            pool.register(row, chain_hashes(text, 4))
        pool.reserve(i32(0, 1), i32(0, 0), i32(8, 20))
        pool.commit(i32(0, 1), i32(8, 20))
        assert cached(pool, OTHER) == 8
        pool.release(i32(0), NOW)
        pool.release(i32(1), fences(fence))
        pool.check()
        assert cached(pool, OTHER) == 20
        pool.retire(5)
        pool.check()
        assert (cached(pool, OTHER), pool.free_blocks()) == (20, 16)
        compute(pool, 2, TEXT[50:99])  # 13 of 16 blocks: all but the first three pages
        assert cached(pool, OTHER) == 12

    def test_pages_in_limbo_behind_a_free_parent_do_not_keep_it(self):
        pool = pool_of(8)
        for row, text in ((0, TEXT[:8]), (1, OTHER[:16])):
            pool.register(row, chain_hashes(text, 4))
        pool.reserve(i32(0, 1), i32(0, 0), i32(8, 16))
        pool.commit(i32(0, 1), i32(8, 16))
        pool.release(i32(0, 1), fences(-1, 3))
        assert (pool.free_blocks(), pool.stats().limbo_blocks, cached(pool, OTHER)) == (4, 4, 16)
        compute(pool, 2, TEXT[50:65])
        assert (pool.free_blocks(), pool.stats().limbo_blocks, cached(pool, OTHER)) == (0, 4, 0)
        pool.retire(3)
        pool.check()
        assert pool.free_blocks() == 4

    def test_output_is_reused_when_someone_can_hash_it(self):
        asked = []

        def hasher(row, first, last):
            asked.append((row, first, last))
            return chain_hashes(TEXT, 4)[first : last - 1]

        pool = pool_of(16, hasher=hasher)
        compute(pool, 0, TEXT[:10])
        pool.reserve(i32(0), i32(10), i32(22))
        pool.commit(i32(0), i32(21))
        assert (cached(pool, TEXT), asked) == (8, [])
        pool.release(i32(0), NOW)
        assert (cached(pool, TEXT), asked) == (16, [(0, 2, 5)])
        assert pool.attach(i32(0), i32(20)).tolist() == [16], "the row itself resumes from what it computed"
        pool.check()

    @pytest.mark.parametrize("same", [4, 8, 31])
    def test_digests_that_begin_alike_are_told_apart(self, same):
        pool = pool_of(16)
        digests = [b"x" * same + bytes([i]) * (32 - same) for i in range(4)]
        for row in (0, 1):
            pool.register(row, digests[2 * row : 2 * row + 1])
            pool.reserve(i32(row), i32(0), i32(4))
            pool.commit(i32(row), i32(4))
            pool.check()
        found = []
        for row, digest in enumerate(digests, 2):
            pool.register(row, (digest,))
            found += pool.attach(i32(row), i32(4)).tolist()
        assert found == [4, 0, 4, 0]
        assert [blocks_of(pool, row, 4) for row in (2, 4)] == [blocks_of(pool, row, 4) for row in (0, 1)]
        pool.release(i32(0, 2), fences(-1, -1))
        pool.register(7, ())
        pool.reserve(i32(7), i32(0), i32(60))  # evicts one of the two; the other must still be found
        pool.check()
        pool.register(8, (digests[2],))
        assert pool.attach(i32(8), i32(4)).tolist() == [4]

    def test_digests_must_be_chains(self):
        pool = pool_of(16)
        a, _, c = chain_hashes(TEXT[:12], 4)
        compute(pool, 0, TEXT[:12])
        pool.register(1, (c,))
        with pytest.raises(ValueError, match="chain"):
            pool.attach(i32(1), i32(8))
        with pytest.raises(ValueError, match="32 bytes"):
            pool.register(1, (a, b"short"))
        pool.check()


class TestEviction:
    def test_the_longest_unused_goes_first_and_children_before_parents(self):
        pool = pool_of(7)
        compute(pool, 0, TEXT[:12])
        compute(pool, 1, OTHER[50:58])
        pool.release(i32(1), NOW)
        pool.release(i32(0), NOW)
        expected = [(12, 8), (12, 8), (12, 8), (12, 4), (12, 0), (8, 0), (4, 0)]
        pool.register(2, ())
        for at, kept in enumerate(expected):
            assert (cached(pool, TEXT[:12]), cached(pool, OTHER[50:58])) == kept
            pool.reserve(i32(2), i32(4 * at), i32(4 * at + 4))
            pool.check()
        assert pool.stats().evictions == 5

    def test_use_renews(self):
        pool = pool_of(4, eviction="lru")
        compute(pool, 0, TEXT[:8])
        compute(pool, 1, OTHER[50:58])
        pool.release(i32(0), NOW)
        pool.release(i32(1), NOW)
        compute(pool, 2, TEXT[:8], end=8)
        pool.release(i32(2), NOW)
        compute(pool, 3, TEXT[80:88])
        assert (cached(pool, TEXT[:8]), cached(pool, OTHER[50:58])) == (8, 0)

    def test_using_the_cache_for_long_does_not_fill_the_queue(self):
        pool = pool_of(6, eviction="lru")
        compute(pool, 0, TEXT[:8])
        compute(pool, 1, OTHER[50:58])
        pool.release(i32(0, 1), fences(-1, -1))
        for _ in range(30):
            pool.attach(i32(0), i32(8))
            pool.release(i32(0), NOW)
            pool.check()
        compute(pool, 2, TEXT[80:96])
        assert (cached(pool, TEXT[:8]), cached(pool, OTHER[50:58])) == (8, 0)

    @pytest.mark.parametrize(("eviction", "kept"), [("arc", 16), ("lru", 0)])
    def test_what_came_back_once_outlives_a_crowd_that_never_does(self, eviction, kept):
        pool = pool_of(12, eviction=eviction)
        for _ in range(2):
            compute(pool, 0, TEXT[:16], end=17)
            pool.release(i32(0), NOW)
        for first in range(100, 180, 8):
            compute(pool, 1, range(first, first + 8))
            pool.release(i32(1), NOW)
        assert cached(pool, TEXT[:16]) == kept

    def test_what_comes_back_after_it_was_given_up_counts_as_used_again(self):
        pool = pool_of(12)
        for first in (0, 100, 200, 300, 0):  # evicts the first text, then asks for it once more
            compute(pool, 0, range(first, first + 16))
            pool.release(i32(0), NOW)
        for first in range(400, 480, 8):
            compute(pool, 1, range(first, first + 8))
            pool.release(i32(1), NOW)
        assert cached(pool, range(16)) == 16

    @pytest.mark.parametrize("eviction", ["arc", "lru"])
    def test_what_a_waiting_request_will_use_is_evicted_last(self, eviction):
        pool = pool_of(8, eviction=eviction)
        for first in (0, 100):
            compute(pool, 0, range(first, first + 16))
            pool.release(i32(0), NOW)
        pool.register(1, chain_hashes(range(16), 4))
        pool.pin(i32(1), i32(16))
        pool.register(2, ())
        pool.reserve(i32(2), i32(0), i32(16))
        pool.check()
        assert (cached(pool, range(16)), cached(pool, range(100, 116))) == (16, 0)
        pool.reserve(i32(2), i32(16), i32(20))  # nothing else is left
        assert cached(pool, range(16)) == 12

    def test_only_what_was_pinned_last_is(self):
        pool = pool_of(8, eviction="lru")
        for row, first in ((0, 0), (1, 100)):
            compute(pool, row, range(first, first + 16))
            pool.release(i32(row), NOW)
        for row in (0, 1):
            pool.pin(i32(row), i32(16))
        compute(pool, 2, range(200, 216))
        assert (cached(pool, range(16)), cached(pool, range(100, 116))) == (0, 16)


class TestCopyOnWrite:
    def forked(self, tokens=6, total=8):
        pool = pool_of(total)
        compute(pool, 0, TEXT[:6])
        pool.register(1, ())
        pool.fork(0, 1, tokens)
        pool.check()
        return pool

    def test_a_fork_shares_the_blocks_that_cover_it(self):
        pool = self.forked()
        assert blocks_of(pool, 1, 6) == blocks_of(pool, 0, 6)
        assert pool.live_blocks() == 2
        assert self.forked(tokens=4).tables(i32(1), i32(4)).tolist() == [[0]]
        assert self.forked(tokens=0).live_blocks() == 2

    def test_a_fork_has_computed_no_more_than_its_parent(self):
        pool = pool_of(8)
        pool.register(0, ())
        pool.reserve(i32(0), i32(0), i32(8))
        pool.commit(i32(0), i32(5))
        pool.register(1, chain_hashes(TEXT[:8], 4))
        pool.fork(0, 1, 8)
        pool.release(i32(0, 1), fences(-1, -1))
        assert cached(pool, TEXT[:8]) == 4

    def test_the_first_to_write_copies_and_the_last_owner_does_not(self):
        pool = self.forked()
        shared = blocks_of(pool, 0, 6)[1]
        assert pool.growth_need(i32(0, 1), i32(6, 6), i32(7, 7)).tolist() == [1, 1]
        copies = pool.reserve(i32(0, 1), i32(6, 6), i32(7, 7)).tolist()
        assert copies == [[shared, blocks_of(pool, 0, 6)[1]]]
        assert blocks_of(pool, 1, 6)[1] == shared != blocks_of(pool, 0, 6)[1]
        assert pool.growth_need(i32(0, 1), i32(7, 7), i32(8, 8)).tolist() == [0, 0]
        assert (pool.live_blocks(), pool.stats().copies) == (3, 1)
        pool.check()

    def test_writing_into_an_indexed_page_leaves_the_page_alone(self):
        pool = pool_of(8)
        compute(pool, 0, TEXT[:12])
        old = blocks_of(pool, 0, 12)
        assert pool.growth_need(i32(0), i32(6), i32(7)).tolist() == [2], "the page behind it is stale as well"
        copies = pool.reserve(i32(0), i32(6), i32(7)).tolist()
        new = blocks_of(pool, 0, 12)
        assert copies == [[old[2], new[2]], [old[1], new[1]]]
        assert new[0] == old[0] and not set(new[1:]) & set(old)
        pool.check()
        assert cached(pool, TEXT[:12]) == 12
        pool.commit(i32(0), i32(12))
        pool.release(i32(0), NOW)
        pool.check()
        assert (pool.free_blocks(), pool.stats().cached_blocks) == (8, 3)

    def test_a_fork_needs_an_empty_child_and_blocks_to_share(self):
        pool = self.forked()
        pool.register(2, ())
        for parent, child, tokens in ((0, 1, 6), (0, 2, 9), (2, 3, 1)):
            pool.register(3, ())
            with pytest.raises(ValueError, match="hold"):
                pool.fork(parent, child, tokens)
            pool.check()

    def test_forks_free_together_what_they_share(self):
        pool = self.forked()
        pool.register(2, ())
        pool.reserve(i32(2), i32(0), i32(1))
        assert pool.reclaimable(i32(0, 2, 1)).tolist() == [0, 1, 3]
        assert pool.reclaimable(i32(1)).tolist() == [0]
        before = pool.free_blocks()
        pool.release(i32(0, 2, 1), fences(-1, -1, -1))
        assert pool.free_blocks() - before == 3
        pool.check()


class TestFences:
    def test_blocks_wait_for_their_slot(self):
        pool = pool_of(8)
        compute(pool, 0, TEXT[:8])
        pool.release(i32(0), fences(3))
        assert (pool.free_blocks(), pool.live_blocks(), pool.stats().limbo_blocks) == (6, 0, 2)
        pool.retire(2)
        assert pool.free_blocks() == 6
        pool.check()
        pool.retire(4)
        pool.check()
        assert (pool.free_blocks(), pool.stats().limbo_blocks) == (8, 0)

    def test_a_retired_fence_does_not_wait(self):
        pool = pool_of(8)
        compute(pool, 0, TEXT[:8])
        pool.retire(3)
        pool.retire(1)
        pool.release(i32(0), fences(3))
        assert pool.free_blocks() == 8

    def test_pages_in_limbo_can_be_attached(self):
        pool = pool_of(8)
        compute(pool, 0, TEXT[:8])
        pool.release(i32(0), fences(3))
        pool.register(1, chain_hashes(TEXT[:8], 4))
        assert pool.cached_tokens(i32(1), i32(8)).tolist() == [[8, 0]]
        assert pool.attach(i32(1), i32(8)).tolist() == [8]
        assert (pool.free_blocks(), pool.live_blocks(), pool.stats().limbo_blocks) == (6, 2, 0)
        pool.release(i32(1), NOW)
        assert (pool.free_blocks(), pool.stats().limbo_blocks) == (6, 2), "the first fence still holds"
        pool.check()
        pool.retire(3)
        pool.check()
        assert pool.free_blocks() == 8


class TestRows:
    def test_a_row_is_recycled_only_when_empty(self):
        pool = pool_of(8)
        compute(pool, 0, TEXT[:8])
        for act in (
            lambda: pool.forget(0),
            lambda: pool.register(0, ()),
            lambda: pool.attach(i32(0), i32(8)),
        ):
            with pytest.raises(ValueError, match="holds"):
                act()
        pool.release(i32(0), NOW)
        pool.release(i32(0), NOW)
        pool.forget(0)
        assert pool.cached_tokens(i32(0), i32(8)).tolist() == [[0, 0]]

    def test_late_results_of_a_stopped_row_are_passed_over(self):
        pool = pool_of(8)
        compute(pool, 0, TEXT[:8])
        pool.release(i32(0), NOW)
        pool.commit(i32(0), i32(8))
        pool.check()

    @pytest.mark.parametrize("row", [-1, 5])
    def test_unknown_rows_are_errors(self, row):
        pool = pool_of(8, max_rows_hint=4)
        rows, one = i32(0, row), i32(1, 1)
        acts = [
            lambda: pool.growth_need(rows, one, one),
            lambda: pool.reserve(rows, one, one),
            lambda: pool.attach(rows, one),
            lambda: pool.cached_tokens(rows, one),
            lambda: pool.commit(rows, one),
            lambda: pool.release(rows, fences(-1, -1)),
            lambda: pool.reclaimable(rows),
            lambda: pool.tables(rows, one),
            lambda: pool.fork(0, row, 1),
            lambda: pool.fork(row, 0, 1),
            lambda: pool.forget(row),
        ]
        for act in acts:
            with pytest.raises(IndexError, match="never registered"):
                act()
        with pytest.raises(ValueError, match="negative"):
            pool.register(-1, ())

    def test_a_million_waiting_rows_cost_little(self):
        pool = pool_of(64, max_rows_hint=8)
        digest = chain_hashes(TEXT[:4], 4)
        for row in range(0, 1_000_000, 1000):
            pool.register(row, digest)
        pool.register(999_999, chain_hashes(TEXT[:8], 4))
        size = sum(array.nbytes for array in pool._state)
        assert size <= 40 * 1_000_000
        compute(pool, 999_998, TEXT[:8])
        assert pool.attach(i32(999_999), i32(7)).tolist() == [4]
        assert pool._state.lanes.shape[0] <= 16

    def test_digest_room_is_used_again(self):
        pool = pool_of(8, max_rows_hint=8)
        for turn in range(2000):
            pool.register(turn % 8, chain_hashes(TEXT[: 4 * (1 + turn % 20)], 4))
            pool.forget((turn * 3) % 8)
        pool._chains.audit()
        assert pool._state.chain.shape[0] <= 512


def test_a_prefix_is_found_by_its_digests_without_a_row() -> None:
    pool = BlockPool(8, 4)
    digests = chain_hashes(list(range(12)), 4)
    rows = np.zeros(1, np.int32)
    assert pool.prefix_tokens(digests, 12) == 0
    pool.register(0, digests[:2])
    pool.reserve(rows, rows, rows + 8)
    pool.commit(rows, rows + 8)
    assert pool.prefix_tokens(digests, 12) == 8
    assert pool.prefix_tokens(digests, 7) == 4
    assert pool.prefix_tokens((), 12) == 0
    pool.check()
