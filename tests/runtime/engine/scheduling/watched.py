"""A scheduler with a model of the cache behind it, which checks each step against what base.py promises.

The model cache holds token ids where a device holds keys and values, so that a row whose slot holds its sequence's own
tokens computes what the sequence would compute alone.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from llmc.buckets.plan import Plan
from llmc.runtime.engine.scheduling import open_scheduler
from llmc.runtime.engine.scheduling.base import ScheduledBatch, ScheduledRow, SchedulerConfig


@dataclass
class Client:
    """A sequence as its sender knows it."""

    prompt: list[int]
    arrival: int
    priority: int
    group: int | None
    budget: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    slot: int = -1
    admitted: int | None = None
    """The step of its admission."""
    ran: int = 0
    """The step of its last row."""

    @property
    def prefilling(self) -> bool:
        return self.admitted is not None and len(self.tokens) == len(self.prompt)

    @property
    def offsets(self) -> int:
        """Tokens that it puts into the cache if it makes all it may: all but the last one."""
        return len(self.prompt) + self.budget - 1


class Watched:
    """Add, cancel and step as on a scheduler; every `step` is checked. `next_token` answers for the model.

    With `drafts`, rows may carry so many guesses, of which every `wrong`-th is wrong.
    """

    def __init__(
        self, plan: Plan, config: SchedulerConfig, next_token: Callable[[list[int]], int] = len, *, drafts: int = 0,
        wrong: int = 4,
    ) -> None:  # fmt: skip
        self.plan, self.config, self.next_token = plan, config, next_token
        self.drafts, self.wrong = drafts, wrong
        self.scheduler = open_scheduler(plan, config, self._draft if drafts else None)
        # whatever warming up left there
        left = (config.cache_tokens or 0) // config.slots // config.block_tokens * config.block_tokens
        self.cache: list[list[int]] = [[-1] * left for _ in range(config.slots)]
        self.clients: dict[int, Client] = {}
        self.ended: dict[int, list[int]] = {}
        self.steps = self.arrivals = self.since_decode = 0
        self.decoded: set[int] = set()
        """Sequences in the last decode step."""
        self.counts: Counter[str] = Counter()
        shortest = 1 if config.exact else min(b.query for b in plan.prompt)
        if config.exact:
            limit = plan.limits.max_num_batched_tokens
            shortest = min(limit, config.prompt_chunk or limit, config.prefill_budget)
        if config.ragged:
            shortest = 1
        turns = plan.limits.longest_prompt // shortest + 2
        # every prompt in prefill takes a turn each, every turn followed by a decode step at most
        self.patience = 2 * turns * (config.max_num_seqs + 1) * (2 if config.slots > config.max_num_seqs else 4)

    def add(
        self, sequence: int, prompt: list[int], priority: int = 0, group: int | None = None, budget: int | None = None
    ) -> None:
        self.arrivals += 1
        self.scheduler.add(sequence, prompt, priority=priority, group=group, budget=budget)
        room = self.plan.limits.max_model_len - len(prompt)
        budget = room if budget is None else min(room, budget)
        self.clients[sequence] = Client(list(prompt), self.arrivals, priority, group, budget, list(prompt))

    def cancel(self, sequence: int) -> None:
        self.scheduler.cancel(sequence)
        client = self.clients.pop(sequence, None)
        if client is not None:
            self.ended[sequence] = client.tokens

    def step(
        self, finish: Callable[[Client], bool], meanwhile: Callable[[], None] = lambda: None
    ) -> ScheduledBatch | None:
        """One step, or None when idle. `finish` says whether a sequence ends with its next token, besides at
        max_model_len; `meanwhile` may add and cancel while the step runs."""
        work = self.scheduler.next()
        if work is None:
            self.check_idle()
            return None
        self.steps += 1
        self._check_admissions(work)
        self._copy(work)
        self._check_rows(work)
        self._check_turn(work)
        before = dict(self.clients)
        meanwhile()
        tokens: dict[int, list[int]] = {}
        finished = set()
        for row in work.rows:
            client = before[row.sequence]
            client.ran = self.steps
            if not row.emits:
                client.cached = row.start + len(row.tokens)
                continue
            built = self._built(client, row, finish)
            client.cached = row.start + len(row.tokens) - row.drafted + len(built) - 1
            if self.clients.get(row.sequence) is client:
                client.tokens += built
                tokens[row.sequence] = built
                self.counts["tokens"] += len(built)
                if self._ends(client, finish):
                    finished.add(row.sequence)
                    self.ended[row.sequence] = self.clients.pop(row.sequence).tokens
                    self.counts["finished"] += 1
        self.scheduler.complete(work, tokens, finished)
        self._check_counts()
        return work

    def _ends(self, client: Client, finish: Callable[[Client], bool]) -> bool:
        return len(client.tokens) > client.offsets or finish(client)

    def _built(self, client: Client, row: ScheduledRow, finish: Callable[[Client], bool]) -> list[int]:
        """The row's next token, and those after it as far as its drafts hold and the sequence does not end."""
        then = Client(client.prompt, 0, 0, None, client.budget, list(client.tokens))
        built = []
        for guess in (*row.tokens[len(row.tokens) - row.drafted :], None):
            built.append(self.next_token(then.tokens))
            then.tokens.append(built[-1])
            if built[-1] != guess or self._ends(then, finish):
                break
        self.counts["drafted"] += row.drafted
        self.counts["held"] += len(built) - 1
        return built

    def _draft(self, sequence: int, tokens: array[int], most: int) -> Sequence[int]:
        client = self.clients[sequence]
        assert tokens.tolist() == client.tokens, "drafts follow what the sequence has"
        then = list(client.tokens)
        for _ in range(min(self.drafts, most, client.offsets - len(client.tokens))):
            right = self.next_token(then)
            then.append(right + (len(then) % self.wrong == 0))
        return then[len(client.tokens) :]

    def _check_admissions(self, work: ScheduledBatch) -> None:
        waiting = {s: c for s, c in self.clients.items() if c.admitted is None}
        for sequence, saved in work.admitted:
            client = waiting.pop(sequence)
            if self.config.ragged:
                assert any(row.sequence == sequence for row in work.rows), "its first tokens run in the same step"
            for other in waiting.values():
                ahead = self._rank(other) < self._rank(client)
                assert not ahead or self._held_up(other), "a later arrival overtook by more than its priority allows"
            assert 0 <= saved < len(client.prompt), "a prompt token has to be computed"
            assert saved == 0 or saved >= self.config.min_prefix or client.group is not None
            assert saved == 0 or self.config.min_prefix or client.group is not None, "no reuse was asked for"
            client.admitted = client.ran = self.steps
            client.cached = saved
            self.counts["admitted"] += 1
            self.counts["prompt tokens"] += len(client.prompt)
            self.counts["saved tokens"] += saved
            self.counts["prefix hits"] += saved > 0
        live = sum(c.admitted is not None for c in self.clients.values())
        assert live <= self.config.max_num_seqs
        if live < self.config.max_num_seqs:
            if not self.config.ragged:
                assert all(self._held_up(c) for c in waiting.values()), "a sequence waits while it could be admitted"
            elif waiting:
                first = min(waiting.values(), key=self._rank)
                assert self._waits_rightly(first, work), "a sequence waits while it could be admitted"

    def _rank(self, client: Client) -> tuple[int, int]:
        return client.arrival + self.config.overtake * client.priority, client.arrival

    def _waits_rightly(self, first: Client, work: ScheduledBatch) -> bool:
        """Whether the first of the queue waits for tokens of this step, for the step's room, or for the pool's."""
        if not self._fits(first):
            self.counts["waited for the pool"] += 1
            return True
        least = 1 if first.group is not None else self.config.min_prefix
        for row in work.rows:
            other = self.clients[row.sequence]
            stop = min(row.start + len(row.tokens), len(first.prompt) - 1)
            alike = next((i for i in range(stop) if other.tokens[i] != first.prompt[i]), stop)
            if least and other.prefilling and alike >= least:
                self.counts["waited for a beginning"] += 1
                return True
        return self._prompt_tokens(work) == self._most_prompt_tokens()

    def _fits(self, client: Client) -> bool:
        if self.config.cache_tokens is None:
            return True
        live = [c.offsets for c in self.clients.values() if c.admitted is not None]
        return sum(map(self._blocks, [*live, client.offsets])) <= self.config.cache_tokens

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.config.block_tokens) * self.config.block_tokens

    def _prompt_tokens(self, work: ScheduledBatch) -> int:
        return sum(len(row.tokens) for row in work.rows if self.clients[row.sequence].prefilling)

    def _most_prompt_tokens(self) -> int:
        """Of a ragged step."""
        limit = self.plan.limits.max_num_batched_tokens
        decoding = len(self._decoding())
        if decoding:
            return min(self.config.prefill_budget, limit - decoding)
        return min(limit, self.config.prompt_chunk or limit, max(b.tokens for b in self.plan.prompt))

    def _decoding(self) -> set[int]:
        return {s for s, c in self.clients.items() if len(c.tokens) > len(c.prompt)}

    def _held_up(self, client: Client) -> bool:
        if self.config.ragged:
            return False
        siblings = (c for c in self.clients.values() if c.group == client.group and c is not client)
        return client.group is not None and any(c.prefilling for c in siblings)

    def _copy(self, work: ScheduledBatch) -> None:
        for copy in work.copies:
            cuts = self.config.cache_tokens is not None and copy.source == copy.target
            assert cuts or (copy.source != copy.target and copy.length > 0)
            assert copy.length <= len(self.cache[copy.source])
            self.cache[copy.target] = self.cache[copy.source][: copy.length]
            self._check_pool()
            self.counts["cuts" if cuts else "copies"] += 1
            self.counts["copied tokens"] += copy.length

    def _check_pool(self) -> None:
        """What the slots hold fits, and would also if every live sequence had come to its end."""
        if self.config.cache_tokens is None:
            return
        assert sum(self._blocks(len(held)) for held in self.cache) <= self.config.cache_tokens
        ends = {c.slot: c.offsets for c in self.clients.values() if c.slot >= 0}
        later = [max(ends.get(slot, 0), len(held)) for slot, held in enumerate(self.cache)]
        assert sum(map(self._blocks, later)) <= self.config.cache_tokens, "the pool is promised more than once"

    def _check_rows(self, work: ScheduledBatch) -> None:
        rows, limits = work.rows, self.plan.limits
        slots = [row.slot for row in rows]
        assert rows and len(set(slots)) == len(slots)
        assert all(0 <= slot < self.config.slots for slot in slots)
        assert len({row.sequence for row in rows}) == len(rows)
        if work.phase == "decode" and not self.config.ragged:
            assert slots == list(range(len(rows))), "decode runs over the first slots, in order"
        if self.config.ragged:
            assert work.bucket is None
            self._check_ragged(work)
        elif self.config.exact:
            assert work.bucket is None and (work.phase == "decode" or len(rows) == 1)
            if work.phase == "prompt":
                most = min(limits.max_num_batched_tokens, self.config.prompt_chunk or limits.max_num_batched_tokens)
                assert len(rows[0].tokens) <= most
        else:
            bucket = work.bucket
            assert bucket is not None and bucket in self.plan.buckets and bucket.phase == work.phase
            assert bucket.covers(len(rows), max(len(r.tokens) for r in rows), max(r.start for r in rows))
        for row in rows:
            client = self.clients[row.sequence]
            count = len(row.tokens) - row.drafted
            stop = row.start + count
            decodes = len(client.tokens) > len(client.prompt)
            assert client.admitted is not None
            assert row.start <= client.cached < stop <= len(client.tokens), "no token is skipped, each step gets on"
            assert list(row.tokens[:count]) == client.tokens[row.start : stop]
            assert self.cache[row.slot][: row.start] == client.tokens[: row.start], "the slot holds the row's past"
            assert row.emits == (stop == len(client.tokens))
            if decodes:
                assert row.start == client.cached and stop == len(client.tokens)
                assert row.start + len(row.tokens) <= client.offsets, "no draft goes beyond the sequence's budget"
            else:
                assert client.prefilling and not row.drafted
                self.counts["computed again"] += client.cached - row.start
            assert decodes or work.phase == "prompt"
            assert not row.drafted or work.phase == "decode"
            assert not row.drafted or self.config.ragged or (self.config.exact and len(rows) == 1)
            if self.config.ragged:
                assert client.slot in (-1, row.slot), "a sequence stays in its slot"
            client.slot = row.slot
        assert sum(len(row.tokens) for row in rows) <= limits.max_num_batched_tokens or work.bucket
        for row in rows:
            self.cache[row.slot] = self.cache[row.slot][: row.start] + list(row.tokens)
            self._check_pool()

    def _check_ragged(self, work: ScheduledBatch) -> None:
        """Everybody who decodes has a row, and prompts, the first come first, share what the budget leaves."""
        rows = [row for row in work.rows if self.clients[row.sequence].prefilling]
        assert {row.sequence for row in work.rows} >= self._decoding()
        assert (work.phase == "prompt") == bool(rows)
        assert work.decode_rows == (len(work.rows) - len(rows) if rows else 0)
        assert all(row.sequence in self._decoding() for row in work.rows[: work.decode_rows])
        assert all(row.emits for row in rows[:-1]), "only the last prompt is cut"
        started = {s for s, c in self.clients.items() if c.prefilling}
        assert self._prompt_tokens(work) <= self._most_prompt_tokens()
        if started - {row.sequence for row in rows} or not all(row.emits for row in rows):
            assert self._prompt_tokens(work) == self._most_prompt_tokens(), "a prompt waits while there is room"

    def _check_turn(self, work: ScheduledBatch) -> None:
        """Fairness: what may run between two decode steps, and that everybody's turn comes."""
        decoding = self._decoding()
        roomy = self.config.slots > self.config.max_num_seqs
        if work.phase == "decode":
            ran = {row.sequence for row in work.rows}
            assert ran == decoding if roomy or self.config.ragged else ran <= decoding
            self.counts["held up"] += len(decoding) - len(ran)
            self.since_decode = 0
            self.decoded = ran
            self.counts["decode steps"] += 1
        else:
            self.counts["prompt steps"] += 1
            self.counts["shared prompt steps"] += len(work.rows) > 1
            self.counts["mixed steps"] += bool(decoding) and self.config.ragged
            tokens = work.bucket.tokens if work.bucket else sum(len(row.tokens) for row in work.rows)
            if not decoding or self.config.ragged:
                self.since_decode = 0
            elif roomy or self.decoded & decoding:
                allowed = max(self.config.prefill_budget, 0 if self.since_decode else self._smallest(work))
                self.since_decode += tokens
                assert self.since_decode <= allowed, "decoding sequences wait for longer than the budget"
        for client in self.clients.values():
            assert client.admitted is None or self.steps - client.ran <= self.patience, "a sequence starves"

    def _smallest(self, work: ScheduledBatch) -> int:
        """The least size of buckets that can bring each of the step's prompts to its end."""
        if self.config.exact:
            return 0
        longest = max(len(self.clients[row.sequence].prompt) for row in work.rows)
        return min(
            size
            for size in {b.tokens for b in self.plan.prompt}
            if max(b.context + b.query for b in self.plan.prompt if b.tokens <= size) >= longest
        )

    def _check_counts(self) -> None:
        now = self.scheduler.occupancy
        clients = self.clients.values()
        assert now.waiting == sum(c.admitted is None for c in clients)
        assert now.prefilling == sum(c.prefilling for c in clients)
        assert now.decoding == sum(len(c.tokens) > len(c.prompt) for c in clients)
        assert now.live_tokens == sum(c.cached for c in clients if c.admitted is not None)
        assert min(now.retained_slots, now.free_slots, now.retained_tokens) >= 0
        assert now.prefilling + now.decoding + now.retained_slots + now.free_slots == self.config.slots
        if not self.config.min_prefix:
            assert now.retained_slots == 0

    def check_idle(self) -> None:
        """Nothing is left: every sequence ended, and no slot leaked."""
        now = self.scheduler.occupancy
        assert not self.clients, f"forgotten: {list(self.clients)}"
        assert (now.waiting, now.prefilling, now.decoding, now.live_tokens) == (0, 0, 0, 0)
        assert now.retained_slots + now.free_slots == self.config.slots

    def drain(
        self, finish: Callable[[Client], bool] = lambda client: False, at_most: int = 1_000_000
    ) -> list[ScheduledBatch]:
        """Step until idle."""
        done = []
        while (work := self.step(finish)) is not None:
            done.append(work)
            assert len(done) <= at_most
        return done


def prompts_of(works: Iterable[ScheduledBatch]) -> list[tuple[int, ...]]:
    """The sequences of each prompt step."""
    return [tuple(row.sequence for row in work.rows) for work in works if work.phase == "prompt"]
