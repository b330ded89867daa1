"""Rules of the core, each broken by a small change of the source, and the tests that must notice."""

from __future__ import annotations

from typing import NamedTuple

MACHINE = "tests/core/test_machine.py"
SCHEDULER = "tests/core/test_scheduler.py"
FILLING = "tests/core/test_filling.py"
FAIRNESS = "tests/core/test_fairness.py"
QUEUES = "tests/core/test_table_and_queues.py"
REPOSSESSION = "tests/core/test_repossession.py"
ADAPTERS = "tests/core/test_adapters.py"
POOL = "tests/memory/test_pool.py"
POOL_MACHINE = "tests/memory/test_pool_machine.py"


class Mutant(NamedTuple):
    """One broken rule.

    Attributes:
        name: of the rule, as in the table of docs/testing.md.
        path: file under src/kaiseki.
        old, new: what stands there, once, and what takes its place.
        tests: run in this order until one fails.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "a result of an earlier epoch is dropped",
        "core/applying.py",
        'row["epoch"] != epochs[i] or row["state"] != _RUNNING',
        'row["state"] != _RUNNING',
        (MACHINE,),
    ),
    Mutant(
        "the epoch goes on when a row is recycled",
        "core/table.py",
        'epoch = records[rows[i]]["epoch"] + 1',
        'epoch = records[rows[i]]["epoch"] * 0',
        (QUEUES, MACHINE),
    ),
    Mutant(
        "the epoch goes on when a row is stopped",
        "core/table.py",
        '        row["epoch"] += 1\n',
        "",
        (QUEUES, MACHINE),
    ),
    Mutant(
        "blocks of a stopped row wait for its steps in flight",
        "core/lifecycle.py",
        "self.kv.release(rows, self.table.inflight_slot[rows])",
        "self.kv.release(rows, self.table.inflight_slot[rows] * 0 - 1)",
        (MACHINE,),
    ),
    Mutant(
        "a fence falls when its slot retires",
        "core/scheduler.py",
        "        self.kv.retire(result.slot)\n",
        "",
        (MACHINE,),
    ),
    Mutant(
        "a fence holds until its own slot",
        "memory/changes.py",
        "if lanes[lane, FENCE] > slot:",
        "if lanes[lane, FENCE] > slot + 1:",
        (POOL, POOL_MACHINE),
    ),
    Mutant(
        "a shared block is freed by its last row only",
        "memory/blocks.py",
        "    s.blocks[block, HOLDS] -= 1\n    if s.blocks[block, ROWS] == 0:\n",
        "    s.blocks[block, HOLDS] -= 1\n    if s.blocks[block, ROWS] <= 1:\n",
        (POOL, POOL_MACHINE),
    ),
    Mutant(
        "attaching counts one more row for a block",
        "memory/blocks.py",
        "    s.blocks[block, ROWS] += 1\n    s.blocks[block, HOLDS] += 1\n",
        "    s.blocks[block, HOLDS] += 1\n",
        (POOL, POOL_MACHINE),
    ),
    Mutant(
        "a shared block is copied before it is written",
        "memory/lanes.py",
        "return bool(blocks[block, ROWS] > 1 or blocks[block, PARENT] != UNINDEXED)",
        "return bool(blocks[block, PARENT] != UNINDEXED)",
        (POOL, MACHINE),
    ),
    Mutant(
        "a cached block is copied before it is written",
        "memory/lanes.py",
        "return bool(blocks[block, ROWS] > 1 or blocks[block, PARENT] != UNINDEXED)",
        "return bool(blocks[block, ROWS] > 1)",
        (POOL, POOL_MACHINE),
    ),
    Mutant(
        "a parent is evicted after its children",
        "memory/eviction.py",
        "        _append(s, block)\n        block = s.blocks[block, PARENT]\n",
        "        _append(s, block)\n        block = -1\n",
        (POOL, POOL_MACHINE),
    ),
    Mutant(
        "the longest unused block is evicted first",
        "memory/eviction.py",
        "[block, QUEUE]] -= 1\n    s.blocks[block, QUEUED] = -1\n",
        "[block, QUEUE]] -= 1\n",
        (POOL, POOL_MACHINE),
    ),
    Mutant(
        "the growth of decodes forces someone out",
        "core/displacing.py",
        "    if shortage <= 0:\n",
        "    if shortage <= 1:\n",
        (SCHEDULER, MACHINE),
    ),
    Mutant(
        "the champion is never forced out",
        "core/displacing.py",
        "rows[rows != champion], now)",
        "rows, now)",
        (SCHEDULER, MACHINE),
    ),
    Mutant(
        "the champion is never dispossessed",
        "core/displacing.py",
        "rows = rows[ahead & (rows != champion)]",
        "rows = rows[ahead]",
        (MACHINE, "tests/core/test_fair_shares.py"),
    ),
    Mutant(
        "the champion is never sold",
        "core/displacing.py",
        "rows = rows[(rows != champion) & rested]",
        "rows = rows[rested]",
        (MACHINE,),
    ),
    Mutant(
        "the champion is the oldest",
        "core/scan.py",
        'row["admitted_seq"] < records[oldest]["admitted_seq"]',
        'row["admitted_seq"] > records[oldest]["admitted_seq"]',
        (MACHINE,),
    ),
    Mutant(
        "a starving champion comes first and passes the gates",
        "core/scheduler.py",
        "        self._champion_waits = 0 if served else self._champion_waits + 1\n",
        "        self._champion_waits = 0\n",
        (SCHEDULER, MACHINE),
    ),
    Mutant(
        "the champion's prefill counts as growth",
        "core/scan.py",
        "            counts[GROWTH] += r == champion\n",
        "",
        (SCHEDULER, MACHINE),
    ),
    Mutant(
        "a tenant more than L ahead is gated",
        "core/filling.py",
        "    if counter[tenant] - floor > lag:\n",
        "    if counter[tenant] - floor > 100.0 * lag:\n",
        (FILLING, MACHINE),
    ),
    Mutant(
        "decodes are gated at H",
        "core/filling.py",
        'lag = rules[R_HARD_LAG] if entry["decode"] else rules[R_LAG]',
        'lag = np.inf if entry["decode"] else rules[R_LAG]',
        (FILLING, MACHINE),
    ),
    Mutant(
        "H is twice L",
        "core/scheduler.py",
        "            hard = self.fairness.hard_lag_ns if self.capabilities.pause_decode else np.inf\n",
        "            hard = 50.0 * self.fairness.hard_lag_ns\n",
        (SCHEDULER, MACHINE, "tests/core/test_fair_shares.py"),
    ),
    Mutant(
        "lanes of a tenant are gated",
        "core/filling.py",
        "    ahead = lane_counter[group] - least - lag\n",
        "    ahead = lane_counter[group] - least - 100.0 * lag\n",
        (FILLING, MACHINE),
    ),
    Mutant(
        "a grant is charged within the slot",
        "core/filling.py",
        "                charge(group, ns, counter, weight, lane_counter)\n",
        "",
        (FILLING, MACHINE),
    ),
    Mutant(
        "who comes to want more is lifted",
        "core/fairness.py",
        "                counter[g] = max(counter[g], floor[k])\n",
        "                counter[g] = counter[g]\n",
        (FAIRNESS, "tests/core/test_fair_shares.py"),
    ),
    Mutant(
        "who lacks room keeps its claim",
        "core/fairness.py",
        "wants = slot[UNMET, g] or slot[BLOCKED, g]",
        "wants = slot[UNMET, g]",
        (FAIRNESS, "tests/core/test_fair_shares.py"),
    ),
    Mutant(
        "charges are per weight",
        "core/fairness.py",
        "    share = ns / weight[tenant]\n",
        "    share = ns\n",
        (FAIRNESS, FILLING, MACHINE),
    ),
    Mutant(
        "the measured time replaces the predicted",
        "core/starting.py",
        "        charge(groups[i], actual - charged[i], counter, weight, lane_counter)\n",
        "        charge(groups[i], actual, counter, weight, lane_counter)\n",
        (MACHINE,),
    ),
    Mutant(
        "what is computed in vain is no request's service",
        "core/starting.py",
        "        if valid[i]:\n            records",
        "        if True:\n            records",
        (MACHINE,),
    ),
    Mutant(
        "new work stays below the watermark",
        "core/filling.py",
        "    if needs > 0 and needs > limits[L_ADMISSION] and limits[L_SOLE] == 0.0:\n",
        "    if False:\n",
        (FILLING,),
    ),
    Mutant(
        "what prefills still need counts below the watermark",
        "core/scheduler.py",
        "ceiling - self.kv.live_blocks() - int(found.counts[PROMISED])",
        "ceiling - self.kv.live_blocks()",
        (SCHEDULER, MACHINE),
    ),
    Mutant(
        "who ends leaves the queues",
        "core/lifecycle.py",
        "        self.waiting.take(rows[state == State.WAITING])\n",
        "",
        (MACHINE,),
    ),
    Mutant(
        "who starts leaves both queues",
        "core/queues.py",
        "        watched += remove_row(by_start, start_roots, start_sizes, rows[i])\n",
        "",
        (QUEUES, MACHINE),
    ),
    Mutant(
        "a hole in the running set is filled from its end",
        "core/table.py",
        "        places[last] = hole\n",
        "",
        (QUEUES, MACHINE),
    ),
    Mutant(
        "forks are let go when their sibling has the prompt",
        "core/lifecycle.py",
        "                self._let_go(children, now)\n",
        "                pass\n",
        (SCHEDULER, MACHINE),
    ),
    Mutant(
        "forks are let go when their sibling is stopped",
        "core/lifecycle.py",
        "            for row in rows.tolist():\n                self._release_held(row, now)\n",
        "            pass\n",
        (MACHINE,),
    ),
    Mutant(
        "forks are let go when their sibling ends",
        "core/lifecycle.py",
        "                self._held[parent].remove(row)\n            self._release_held(row, now)\n",
        "                self._held[parent].remove(row)\n",
        (MACHINE,),
    ),
    Mutant(
        "a fork's next write may need a copy",
        "core/starting.py",
        "        life.table.shared_tail[[rows[i], parents[i]]] = True\n",
        "",
        (MACHINE,),
    ),
    Mutant(
        "a request ends once",
        "core/lifecycle.py",
        "            del self.ids[self.names.pop(row)]\n",
        "            self.names.pop(row)\n",
        (MACHINE,),
    ),
    Mutant(
        "a failed row that may not be retried ends",
        "core/applying.py",
        "        result.rows[failed & ~result.retryable], Outcome.FAILED",
        "        result.rows[failed & ~failed], Outcome.FAILED",
        (MACHINE,),
    ),
    Mutant(
        "no output beyond max_tokens",
        "core/scan.py",
        'elif out >= row["max_tokens"] or left <= 0:',
        "elif left <= 0:",
        (MACHINE,),
    ),
    Mutant(
        "rows are disjoint where the engine asks for it",
        "core/scan.py",
        'if row["inflight_slot"] >= 0 and not placeholders:',
        "if False:",
        (MACHINE,),
    ),
    Mutant(
        "a stopped row does not run on in the same slot",
        "core/granting.py",
        "stopped = life.table.preempted_slot[rows] == life.slot",
        "stopped = life.table.preempted_slot[rows] > life.slot",
        (REPOSSESSION, MACHINE),
    ),
    Mutant(
        "an adapter stays while a running request needs it",
        "core/adapters.py",
        'return bool(one["pins"] > 0 or (',
        "return bool((",
        (ADAPTERS,),
    ),
    Mutant(
        "who stops needs its adapter no more",
        "core/adapters.py",
        '            one["pins"] -= 1\n',
        "",
        (ADAPTERS,),
    ),
    Mutant(
        "the adapter used longest ago goes first",
        "core/adapters.py",
        'one["used"] < adapters[held[chosen]]["used"]',
        'one["used"] > adapters[held[chosen]]["used"]',
        (ADAPTERS,),
    ),
    Mutant(
        "an adapter takes one of the slots that are left",
        "core/filling.py",
        "        limits[L_ADAPTERS] -= 1\n",
        "        limits[L_ADAPTERS] -= 0\n",
        (ADAPTERS,),
    ),
    Mutant(
        "a load counts against the bound",
        "core/filling.py",
        "        within = rules[R_BOUND_NS] / rules[R_HEADROOM] - loading\n",
        "        within = rules[R_BOUND_NS] / rules[R_HEADROOM]\n",
        (ADAPTERS,),
    ),
    Mutant(
        "a load is paid by whom it is done for",
        "core/starting.py",
        "            charged[i] += load_ns\n",
        "            charged[i] += 0.0\n",
        (ADAPTERS,),
    ),
    Mutant(
        "a load makes a request less urgent",
        "policies/kaiseki.py",
        "out += view.load_ns / (self.tau_ms * 1e6)",
        "out += 0.0 * view.load_ns",
        (ADAPTERS,),
    ),
)
