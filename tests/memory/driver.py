"""An engine and scheduler that use a pool, simulated down to memory, against the plain model.

`memory[block][offset]` is the KV of one position, named by all tokens up to it. Slots execute in order
and up to three are in flight, so blocks are read and written after the scheduler has let go of them.
Every method makes one random move, or none when it does not apply, and compares all answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from tests.memory.model import Model

from kaiseki.core.decision import Way
from kaiseki.core.protocols import OutOfBlocks
from kaiseki.memory import BlockPool, chain_hashes

ROWS = 8
GARBAGE = ("garbage",)
SCRIPTS = [(0,) * 40, (0,) * 5 + (1,) * 35, (0,) * 13 + (1,) * 27, (1,) * 40]


def i32(*values):
    return np.array(values, np.int32)


@dataclass
class Life:
    """From a row's (re)start to its stop or failure: results of an earlier life are stale."""

    spoilt: bool = False  # a failure made what it computes worthless


@dataclass
class Run:
    """One request."""

    tokens: list
    script: tuple  # what it says, prompt and output
    hashed: bool
    planned: int = 0  # positions reserved so far
    valid: int = 0  # positions committed
    last_slot: int = -1
    life: Life = field(default_factory=Life)


@dataclass
class Chunk:
    """What one slot computes for one row."""

    run: Run
    row: int
    life: Life
    start: int
    end: int
    table: list
    tokens: tuple


@dataclass
class Slot:
    number: int
    copies: list
    moves: list
    chunks: list = field(default_factory=list)


class Driver:
    MOVES = (
        "submit",
        "attach",
        "swap",
        "pin",
        "decide",
        "decide",
        "decide",
        "collect",
        "collect",
        "stop",
        "fork",
        "forget",
    )

    def __init__(self, total, page, hint, hashing, eviction, placement, host):
        hasher = self.output_hashes if hashing else None
        self.pool = BlockPool(
            total,
            page,
            max_rows_hint=hint,
            hasher=hasher,
            eviction=eviction,
            placement=placement,
            host_blocks=host,
        )
        self.host = {}
        self.moves = []
        self.hashing = hashing
        self.model = Model(total, page, eviction == "arc", host)
        self.runs = {}
        self.flight = []
        self.memory = {b: [None] * page for b in range(total)}
        self.next_slot = 0

    @classmethod
    def any(cls, rng):
        """Of random shape."""
        return cls(
            total=rng.randint(3, 40),
            page=rng.choice([1, 2, 4]),
            hint=rng.randint(1, 8),
            hashing=rng.random() < 0.6,
            eviction=rng.choice(["arc", "lru"]),
            placement=rng.choice(["pages", "runs"]),
            host=rng.choice([0, 4, 12]),
        )

    def output_hashes(self, row, first, last):
        run = self.runs[row]
        return chain_hashes(run.tokens, self.model.page)[first:last] if run.hashed else ()

    def hash_prompt(self, row):
        run = self.runs[row]
        chain = chain_hashes(run.tokens, self.model.page) if run.hashed else ()
        self.model.chains[row] = list(chain)
        self.pool.register(row, chain)

    def in_flight(self, row):
        return any(chunk.row == row for slot in self.flight for chunk in slot.chunks)

    def holding(self):
        return [row for row in self.runs if row in self.model.lanes]

    def empty(self):
        return [row for row in self.runs if row not in self.model.lanes]

    # Moves.

    def submit(self, rng):
        if len(self.runs) < ROWS:
            row = rng.choice([r for r in range(ROWS) if r not in self.runs])
            script = rng.choice(SCRIPTS)
            self.runs[row] = Run(list(script[: rng.randint(1, 24)]), script, rng.random() < 0.9)
            self.hash_prompt(row)

    def forget(self, rng):
        rows = [row for row in self.empty() if not self.in_flight(row)]
        if rows:
            row = rng.choice(rows)
            del self.runs[row], self.model.chains[row]
            self.model.drop(row)
            self.pool.forget(row)

    def attach(self, rng):
        rows = pick(rng, self.empty(), 2)
        limits = [len(self.runs[row].tokens) - 1 for row in rows]
        pairs = list(zip(rows, limits, strict=True))
        asked = self.pool.cached_tokens(i32(*rows), i32(*limits)).tolist()
        assert asked == [list(self.model.cached_tokens(*pair)) for pair in pairs]
        if sum(blocks for _, blocks in asked) > self.model.free():
            return
        got = self.pool.attach(i32(*rows), i32(*limits)).tolist()
        shared = [self.model.attach(*pair) for pair in pairs]
        back = [self.model.bring_back(row, has, most) for (row, most), has in zip(pairs, shared, strict=True)]
        assert got == back
        self.adopt()
        self.moves += self.pool.take_moves().tolist()
        assert got == [tokens for tokens, _ in asked]
        for row, tokens in zip(rows, got, strict=True):
            self.runs[row].planned = self.runs[row].valid = tokens

    def pin(self, rng):
        rows = pick(rng, self.empty(), 2)
        limits = [rng.randint(0, len(self.runs[row].tokens)) for row in rows]
        self.pool.pin(i32(*rows), i32(*limits))
        self.model.pin(zip(rows, limits, strict=True))

    def fork(self, rng):
        children = [row for row in self.empty() if not self.in_flight(row)]
        if self.holding() and children:
            parent, child = rng.choice(self.holding()), rng.choice(children)
            old, run = self.runs[parent], self.runs[child]
            tokens = rng.choice([old.valid, rng.randint(0, old.valid)])
            run.tokens = [*old.tokens[:tokens], rng.randint(0, 1)]
            run.script = old.script
            self.hash_prompt(child)
            self.pool.fork(parent, child, tokens)
            self.model.fork(parent, child, tokens)
            run.planned = run.valid = tokens
            self.adopt()

    def decide(self, rng):
        if len(self.flight) == 3:
            return
        rows, starts, ends = pick(rng, list(self.runs), 3), [], []
        for row in rows:
            run = self.runs[row]
            if not self.in_flight(row) and rng.random() < 0.1:  # computes something again
                run.planned = rng.randint(0, run.planned)
            end = run.planned + rng.randint(1, rng.choice([1, 4, 16]))
            while len(run.tokens) < end:
                run.tokens.append(run.script[len(run.tokens) % len(run.script)])
            starts.append(run.planned)
            ends.append(end)
        call = i32(*rows), i32(*starts), i32(*ends)
        need = self.pool.growth_need(*call).tolist()
        assert need == [self.model.need(*chunk) for chunk in zip(rows, starts, ends, strict=True)]
        if sum(need) > self.model.free():
            with pytest.raises(OutOfBlocks):
                self.pool.reserve(*call)
            return
        copies = self.pool.reserve(*call).tolist()
        expected = self.model.reserve(rows, starts, ends)
        self.adopt()
        assert copies == [[old.number, new.number] for old, new in expected]
        assert not {source for source, _ in copies} & {destination for _, destination in copies}
        tables = self.pool.tables(i32(*rows), i32(*ends)).tolist()
        slot = Slot(self.next_slot, copies, self.moves)
        self.moves = []
        self.next_slot += 1
        for row, start, end, table in zip(rows, starts, ends, tables, strict=True):
            run = self.runs[row]
            run.valid, run.planned, run.last_slot = min(run.valid, start), end, slot.number
            slot.chunks.append(Chunk(run, row, run.life, start, end, table, tuple(run.tokens)))
        self.flight.append(slot)

    def collect(self, rng):
        if not self.flight:
            return
        slot = self.flight.pop(0)
        page = self.model.page
        for way, source, destination in slot.moves:
            if way == Way.OUT:
                self.host[destination] = list(self.memory[source])
            else:
                self.memory[destination] = list(self.host[source])
        for source, destination in slot.copies:
            self.memory[destination] = list(self.memory[source])
        victim = rng.choice(slot.chunks) if slot.chunks and rng.random() < 0.15 else None
        for chunk in slot.chunks:
            good = chunk is not victim and not chunk.life.spoilt
            for at in range(0 if chunk.life.spoilt else chunk.start):
                have = self.memory[chunk.table[at // page]][at % page]
                assert have == chunk.tokens[: at + 1], "a step read wrong KV"
            for at in range(chunk.start, chunk.end):
                self.memory[chunk.table[at // page]][at % page] = chunk.tokens[: at + 1] if good else GARBAGE
        for chunk in slot.chunks:
            run = chunk.run
            if chunk is victim:
                chunk.life.spoilt = True
                if run.life is chunk.life:  # starts again from here; what is in flight for it is stale
                    run.life = Life()
                    run.planned = chunk.start
            elif run.life is chunk.life:
                self.pool.commit(i32(chunk.row), i32(chunk.end))
                self.model.commit(chunk.row, chunk.end)
                run.valid = max(run.valid, chunk.end)
        self.pool.retire(slot.number)
        self.model.retire(slot.number)

    def swap(self, rng):
        self.stop(rng, swap=True)

    def stop(self, rng, swap=False):
        rows = pick(rng, list(self.runs), 2)
        assert self.pool.reclaimable(i32(*rows)).tolist() == self.model.reclaimable(rows)
        before = self.pool.free_blocks() + self.pool.stats().limbo_blocks
        freed = self.model.reclaimable(rows)
        fences = []
        for row in rows:
            run, lane = self.runs[row], self.model.lanes.get(row)
            fences.append(run.last_slot if self.in_flight(row) or rng.random() < 0.3 else -1)
            if lane and self.hashing and run.hashed:
                full = chain_hashes(run.tokens, self.model.page)[: lane.committed // self.model.page]
                if len(full) > len(self.model.chains[row]):
                    self.model.chains[row] = list(full)
        if swap:
            kept = [self.model.keep(row) for row in rows]
            assert self.pool.swap_out(i32(*rows), np.array(fences, np.int64)).tolist() == kept
            self.moves += self.pool.take_moves().tolist()
        else:
            self.pool.release(i32(*rows), np.array(fences, np.int64))
        for row, fence in zip(rows, fences, strict=True):
            self.model.release(row, fence)
            run = self.runs[row]
            run.life = Life()
            run.planned = run.valid = 0
        assert self.pool.free_blocks() + self.pool.stats().limbo_blocks - before == (freed[-1] if rows else 0)

    # What must hold after every move.

    def adopt(self):
        """Learn the numbers of new blocks; no number may stand for two blocks."""
        held = {}
        for row, lane in self.model.lanes.items():
            size = len(lane.blocks) * self.model.page
            numbers = self.pool.tables(i32(row), i32(size))[0].tolist()
            for block, number in zip(lane.blocks, numbers, strict=True):
                assert block.number in (None, number), "a row's table changed"
                block.number = number
                assert held.setdefault(number, block) is block, "a block is owned twice"
        for block in self.model.cached + [b for _, blocks in self.model.waiting for b in blocks]:
            assert held.setdefault(block.number, block) is block, "a block that was not free was taken"

    def check(self):
        pool, model = self.pool, self.model
        pool.check()
        stats = pool.stats()
        assert (pool.free_blocks(), pool.live_blocks()) == (model.free(), model.live())
        assert (stats.limbo_blocks, stats.cached_blocks) == (model.limbo(), len(model.cached))
        assert stats.evictions == model.evicted
        assert pool.free_blocks() + pool.live_blocks() + stats.limbo_blocks == pool.total_blocks
        copied = {destination for slot in self.flight for _, destination in slot.copies}
        moves = [move for slot in self.flight for move in slot.moves] + self.moves
        copied |= {destination for way, _, destination in moves if way == Way.IN}
        for row in self.holding():
            run = self.runs[row]
            numbers = [block.number for block in model.lanes[row].blocks]
            self.check_content(run, numbers, run.valid, copied)
        for row in self.empty():
            limit = len(self.runs[row].tokens)
            found = [block.number for block in model.prefix(row, limit)]
            assert pool.cached_tokens(i32(row), i32(limit))[0, 0] == model.cached_tokens(row, limit)[0]
            self.check_content(self.runs[row], found, len(found) * model.page, copied)

    def check_content(self, run, numbers, size, copied):
        """Positions below `size` hold the row's own tokens, or will when a copy has been done."""
        for at in range(size):
            block, offset = numbers[at // self.model.page], at % self.model.page
            if block not in copied:
                assert self.memory[block][offset] == tuple(run.tokens[: at + 1]), f"wrong KV at {at}"


def pick(rng, rows, most):
    """Up to `most` of the rows, in random order."""
    return rng.sample(rows, min(len(rows), rng.randint(1, most)))
