"""The block pool as one would explain it: objects, lists and scans, nothing fast.

Blocks are objects without numbers; the pool under test says which number each got (`adopt`).
"""

from __future__ import annotations

WAYS = 4
STEPS = 10


class Block:
    def __init__(self):
        self.again = False
        self.pinned = False
        self.number = None
        self.digest = None
        self.parent = None
        self.rows = set()
        self.waits = []

    @property
    def fixed(self):
        return len(self.rows) > 1 or self.digest is not None


class Lane:
    def __init__(self):
        self.blocks = []
        self.committed = 0


class Model:
    def __init__(self, total, page, adapts, host):
        self.adapts = adapts
        self.target = STEPS * total // 2
        self.sets = 1
        while self.sets < -(-total // WAYS):
            self.sets *= 2
        self.ghosts = {}  # set -> [(digest, again)], the last one first
        self.page = page
        self.total = total
        self.unowned = total
        self.index = {}
        self.cached = []  # longest unused first, those of both queues in one list
        self.lanes = {}
        self.chains = {}
        self.waiting = []  # (fence, blocks), in order of release
        self.kept = {}  # row -> (first page, tokens), in host memory
        self.host = host
        self.host_used = {}
        self.retired = -1
        self.evicted = 0

    def pages(self, tokens):
        return -(-tokens // self.page)

    # What can be asked.

    def free(self):
        return self.unowned + len(self.cached)

    def live(self):
        return len({id(b) for lane in self.lanes.values() for b in lane.blocks})

    def limbo(self):
        return len({id(b) for _, blocks in self.waiting for b in blocks if not b.rows})

    def prefix(self, row, limit):
        found = []
        for digest in self.chains[row][: max(0, limit) // self.page]:
            if digest not in self.index:
                break
            found.append(self.index[digest])
        return found

    def cached_tokens(self, row, limit):
        found = self.prefix(row, limit)
        tokens, unheld = len(found) * self.page, sum(1 for b in found if not b.rows and not b.waits)
        back = self.restorable(row, len(found), limit)
        return (back, unheld + self.pages(back) - len(found)) if back > tokens else (tokens, unheld)

    def restorable(self, row, pages, limit):
        first, tokens = self.kept.get(row, (0, 0))
        return min(tokens, limit) if pages >= first else 0

    def need(self, row, start, end):
        lane = self.lanes.get(row, Lane())
        if end <= start:
            return 0
        copies = sum(1 for b in lane.blocks[start // self.page :] if b.fixed)
        return max(0, self.pages(end) - len(lane.blocks)) + copies

    def reclaimable(self, rows):
        return [
            sum(1 for b in {id(b): b for r in self.lanes for b in self.lanes[r].blocks}.values()
                if b.rows <= set(rows[: i + 1]))
            for i in range(len(rows))
        ]  # fmt: skip

    # What can be done.

    def attach(self, row, limit):
        found = self.prefix(row, limit)
        if found:
            lane = self.lanes[row] = Lane()
            lane.blocks = found
            lane.committed = len(found) * self.page
            for block in found:
                if block in self.cached:
                    self.cached.remove(block)
                block.rows.add(row)
                block.again = self.adapts
        return len(found) * self.page

    def bring_back(self, row, attached, limit):
        """What is in host memory of a row behind its prefix; how many tokens it has then."""
        tokens = self.restorable(row, attached // self.page, limit)
        self.drop(row)
        if tokens <= attached:
            return attached
        self.reserve([row], [attached], [tokens])
        self.commit(row, tokens)
        return tokens

    def keep(self, row):
        """Note what goes to host memory, before the row's blocks are released; whether there is room."""
        lane = self.lanes.get(row)
        if lane is None:
            return False
        self.drop(row)
        blocks = lane.blocks[: self.pages(lane.committed)]
        first = next((at for at, b in enumerate(blocks) if len(b.rows) == 1), len(blocks))
        size = len(blocks) - first
        fits = 0 < size <= self.host - sum(self.host_used.values())
        if fits:
            self.kept[row], self.host_used[row] = (first, lane.committed), size
        return fits

    def drop(self, row):
        self.kept.pop(row, None)
        self.host_used.pop(row, None)

    def fork(self, parent, child, tokens):
        self.drop(child)
        if tokens <= 0:
            return
        lane = self.lanes[child] = Lane()
        lane.blocks = self.lanes[parent].blocks[: self.pages(tokens)]
        lane.committed = min(tokens, self.lanes[parent].committed)
        for block in lane.blocks:
            block.rows.add(child)

    def reserve(self, rows, starts, ends):
        """Does it and returns [(source, destination)] blocks."""
        copies, let_go = [], []
        needed = sum(self.need(*chunk) for chunk in zip(rows, starts, ends, strict=True))
        while self.unowned < needed:
            self._evict()
        for row, start, end in zip(rows, starts, ends, strict=True):
            if end <= start:
                continue
            lane = self.lanes.setdefault(row, Lane())
            lane.committed = min(lane.committed, start)
            for at in reversed(range(start // self.page, len(lane.blocks))):
                old = lane.blocks[at]
                if old.fixed:
                    new = lane.blocks[at] = self._take(row)
                    copies.append((old, new))
                    old.rows.remove(row)
                    let_go.append(old)
            while len(lane.blocks) < self.pages(end):
                lane.blocks.append(self._take(row))
        for old in dict.fromkeys(let_go):
            self._settle(old)
        return copies

    def commit(self, row, valid):
        lane = self.lanes.get(row)
        if lane and valid > lane.committed:
            before = self._full(row)
            lane.committed = min(valid, len(lane.blocks) * self.page)
            if self._full(row) > before:
                self._index(row)

    def pin(self, pairs):
        for block in self.index.values():
            block.pinned = False
        for row, limit in pairs:
            for block in self.prefix(row, limit):
                block.pinned = True

    def release(self, row, fence):
        lane = self.lanes.get(row)
        if lane is None:
            return
        self._index(row, leaving=True)
        del self.lanes[row]
        for block in lane.blocks:
            block.rows.remove(row)
        if fence > self.retired:
            self.waiting.append((fence, lane.blocks))
            for block in lane.blocks:
                block.waits.append(fence)
        else:
            for block in reversed(lane.blocks):
                self._settle(block)

    def retire(self, slot):
        self.retired = max(self.retired, slot)
        due = [(f, blocks) for f, blocks in self.waiting if f <= self.retired]
        self.waiting = [(f, blocks) for f, blocks in self.waiting if f > self.retired]
        for fence, blocks in due:
            for block in reversed(blocks):
                block.waits.remove(fence)
                self._settle(block)

    # How.

    def _take(self, row):
        self.unowned -= 1
        block = Block()
        block.rows = {row}
        return block

    def _evict(self):
        victim = self._victim()
        self._strip_children(victim)
        self.cached.remove(victim)
        del self.index[victim.digest]
        self._remember(victim)
        self.unowned += 1
        self.evicted += 1

    def _victim(self):
        if all(block.pinned for block in self.cached):
            for block in self.index.values():
                block.pinned = False
        once = [b for b in self.cached if not b.again]
        again = [b for b in self.cached if b.again]
        over = len(once) * STEPS * self.total > self.target * len(self.cached)
        first, second = (once, again) if once and (over or not again) else (again, once)
        free = self._unpinned(first) or self._unpinned(second)
        victim = free[0]
        if victim.again and self._children(victim):
            return (self._unpinned(once) or free)[0]
        return victim

    def _unpinned(self, queue):
        """Those of a queue that are not pinned, after pinned ones before them have been put to the end."""
        for _ in range(len(queue)):
            if not queue[0].pinned:
                return queue
            block = queue[0]
            while block in self.cached:
                self.cached.remove(block)
                self.cached.append(block)
                if block in queue:
                    queue.remove(block)
                    queue.append(block)
                block = block.parent
        return []

    def _home(self, digest):
        return self.ghosts.setdefault(int.from_bytes(digest[:4], "little") & (self.sets - 1), [])

    def _remember(self, block):
        if self.adapts:
            home = self._home(block.digest)
            home.insert(0, (block.digest, block.again))
            del home[WAYS:]

    def _recall(self, digest):
        members = [again for home in self.ghosts.values() for _, again in home]
        home = self._home(digest)
        found = [ghost for ghost in home if ghost[0] == digest]
        if not found:
            return False
        home.remove(found[0])
        again, once = sum(members), len(members) - sum(members)
        if found[0][1]:
            self.target = max(self.target - max(1, once // again), 0)
        else:
            self.target = min(self.target + max(1, again // once), STEPS * self.total)
        return True

    def _full(self, row):
        return min(self.lanes[row].committed // self.page, len(self.chains[row]))

    def _children(self, block):
        return [b for b in self.index.values() if b.parent is block]

    def _strip_children(self, block):
        """Children of a cached block can only be grafts in limbo: these lose their digests, leaves first."""
        while self._children(block):
            for _, blocks in self.waiting:
                before, grafted = None, False
                suspects = []
                for b in blocks:
                    grafted |= b.digest is not None and b.parent is not before
                    before = b
                    if grafted:
                        suspects.append(b)
                for b in reversed(suspects):
                    if not b.rows and b.digest is not None and not self._children(b):
                        del self.index[b.digest]
                        b.digest = b.parent = None

    def _settle(self, block):
        if block.rows or block.waits:
            return
        if block.digest is None:
            self.unowned += 1
            return
        self.cached.append(block)
        parent = block.parent
        while parent in self.cached:
            self.cached.remove(parent)
            self.cached.append(parent)
            parent = parent.parent

    def _index(self, row, leaving=False):
        lane = self.lanes[row]
        own_parent, parent = True, None
        for at, digest in enumerate(self.chains[row][: self._full(row)]):
            own, known = lane.blocks[at], self.index.get(digest)
            if known is None:
                if own.digest is not None or not (own_parent or (leaving and own.rows == {row})):
                    return
                own.digest, own.parent, own.pinned = digest, parent, False
                own.again = self._recall(digest) and (parent is None or parent.again)
                self.index[digest] = known = own
            own_parent = own_parent and known is own
            if not own_parent and not leaving:
                return
            parent = known
