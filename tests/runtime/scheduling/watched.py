"""A scheduler with a model of the cache behind it, which checks each step against what base.py promises.

The model cache holds token ids where a device holds keys and values, so that a row whose slot holds its sequence's own
tokens computes what the sequence would compute alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from llmc.buckets.plan import Plan
from llmc.runtime.scheduling.base import SchedulerConfig, Work
from llmc.runtime.scheduling.scheduler import Scheduler


@dataclass
class Client:
    """A sequence as its sender knows it."""

    prompt: list[int]
    arrival: int
    priority: int
    group: int | None
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    admitted: int | None = None
    """The step of its admission."""
    ran: int = 0
    """The step of its last row."""

    @property
    def prefilling(self) -> bool:
        return self.admitted is not None and len(self.tokens) == len(self.prompt)


class Watched:
    """Add, cancel and step as on a scheduler; every `step` is checked. `next_token` answers for the model."""

    def __init__(self, plan: Plan, config: SchedulerConfig, next_token: Callable[[list[int]], int] = len) -> None:
        self.plan, self.config, self.next_token = plan, config, next_token
        self.scheduler = Scheduler(plan, config)
        self.cache: list[list[int]] = [[] for _ in range(config.slots)]
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
        turns = plan.limits.longest_prompt // shortest + 2
        # every prompt in prefill takes a turn each, every turn followed by a decode step at most
        self.patience = 2 * turns * (config.max_num_seqs + 1) * (2 if config.slots > config.max_num_seqs else 4)

    def add(self, sequence: int, prompt: list[int], priority: int = 0, group: int | None = None) -> None:
        self.arrivals += 1
        self.scheduler.add(sequence, prompt, priority=priority, group=group)
        self.clients[sequence] = Client(list(prompt), self.arrivals, priority, group, list(prompt))

    def cancel(self, sequence: int) -> None:
        self.scheduler.cancel(sequence)
        client = self.clients.pop(sequence, None)
        if client is not None:
            self.ended[sequence] = client.tokens

    def step(self, finish: Callable[[Client], bool], meanwhile: Callable[[], None] = lambda: None) -> Work | None:
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
        tokens, finished = {}, set()
        for row in work.rows:
            client = before[row.sequence]
            client.cached = row.start + len(row.tokens)
            client.ran = self.steps
            if row.emits and self.clients.get(row.sequence) is client:
                tokens[row.sequence] = self.next_token(client.tokens)
                client.tokens.append(tokens[row.sequence])
                self.counts["tokens"] += 1
                if finish(client) or len(client.tokens) >= self.plan.limits.max_model_len:
                    finished.add(row.sequence)
                    self.ended[row.sequence] = self.clients.pop(row.sequence).tokens
                    self.counts["finished"] += 1
        self.scheduler.complete(work, tokens, finished)
        self._check_counts()
        return work

    def _check_admissions(self, work: Work) -> None:
        waiting = {s: c for s, c in self.clients.items() if c.admitted is None}
        for sequence, saved in work.admitted:
            client = waiting.pop(sequence)
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
            assert all(self._held_up(c) for c in waiting.values()), "a sequence waits while it could be admitted"

    def _rank(self, client: Client) -> tuple[int, int]:
        return client.arrival + self.config.overtake * client.priority, client.arrival

    def _held_up(self, client: Client) -> bool:
        siblings = (c for c in self.clients.values() if c.group == client.group and c is not client)
        return client.group is not None and any(c.prefilling for c in siblings)

    def _copy(self, work: Work) -> None:
        for copy in work.copies:
            assert copy.source != copy.target and 0 < copy.length <= len(self.cache[copy.source])
            self.cache[copy.target] = self.cache[copy.source][: copy.length]
            self.counts["copies"] += 1
            self.counts["copied tokens"] += copy.length

    def _check_rows(self, work: Work) -> None:
        rows, limits = work.rows, self.plan.limits
        slots = [row.slot for row in rows]
        assert rows and len(set(slots)) == len(slots)
        assert all(0 <= slot < self.config.slots for slot in slots)
        assert len({row.sequence for row in rows}) == len(rows)
        if work.phase == "decode":
            assert slots == list(range(len(rows))), "decode runs over the first slots, in order"
        if self.config.exact:
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
            stop = row.start + len(row.tokens)
            assert client.admitted is not None
            assert row.start <= client.cached < stop <= len(client.tokens), "no token is skipped, each step gets on"
            assert list(row.tokens) == client.tokens[row.start : stop]
            assert self.cache[row.slot][: row.start] == client.tokens[: row.start], "the slot holds the row's past"
            assert row.emits == (stop == len(client.tokens))
            if work.phase == "decode":
                assert row.start == client.cached and stop == len(client.tokens) > len(client.prompt)
            else:
                assert client.prefilling
                self.counts["computed again"] += client.cached - row.start
        for row in rows:
            self.cache[row.slot] = self.cache[row.slot][: row.start] + list(row.tokens)

    def _check_turn(self, work: Work) -> None:
        """Fairness: what may run between two decode steps, and that everybody's turn comes."""
        decoding = {s for s, c in self.clients.items() if len(c.tokens) > len(c.prompt)}
        roomy = self.config.slots > self.config.max_num_seqs
        if work.phase == "decode":
            ran = {row.sequence for row in work.rows}
            assert ran == decoding if roomy else ran <= decoding
            self.counts["held up"] += len(decoding) - len(ran)
            self.since_decode = 0
            self.decoded = ran
            self.counts["decode steps"] += 1
        else:
            self.counts["prompt steps"] += 1
            self.counts["shared prompt steps"] += len(work.rows) > 1
            tokens = work.bucket.tokens if work.bucket else sum(len(row.tokens) for row in work.rows)
            if not decoding:
                self.since_decode = 0
            elif roomy or self.decoded & decoding:
                allowed = max(self.config.prefill_budget, 0 if self.since_decode else self._smallest(work))
                self.since_decode += tokens
                assert self.since_decode <= allowed, "decoding sequences wait for longer than the budget"
        for client in self.clients.values():
            assert client.admitted is None or self.steps - client.ran <= self.patience, "a sequence starves"

    def _smallest(self, work: Work) -> int:
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

    def drain(self, finish: Callable[[Client], bool] = lambda client: False, at_most: int = 1_000_000) -> list[Work]:
        """Step until idle."""
        done = []
        while (work := self.step(finish)) is not None:
            done.append(work)
            assert len(done) <= at_most
        return done


def prompts_of(works: Iterable[Work]) -> list[tuple[int, ...]]:
    """The sequences of each prompt step."""
    return [tuple(row.sequence for row in work.rows) for work in works if work.phase == "prompt"]
