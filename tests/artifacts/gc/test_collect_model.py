"""The decision against a model that tries everything the slow way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.gc import CollectionPlan, Inventory, Item, RetentionLimits, decide, size_of
from llmc.artifacts.store.layout import File
from tests.tiers import examples, full

NOW = 1_000_000.0
GRACE = 100.0
DIGESTS = [f"sha256:{digit * 64}" for digit in "abcdef"]


def blob_file(number: int, size: int, links: int, age: float) -> File:
    return File((1, number), size, links, NOW - age, NOW - age)


@st.composite
def censuses(draw: Any) -> Inventory:
    ages = st.sampled_from([-500.0, -50.0, 0.0, 50.0, 99.0, 101.0, 500.0, 900.0])
    present = draw(st.sets(st.sampled_from(DIGESTS)))
    blobs = {
        digest: blob_file(number, draw(st.integers(0, 50)), draw(st.integers(1, 2)), draw(ages))
        for number, digest in enumerate(DIGESTS)
        if digest in present
    }
    items = {}
    for number in range(draw(st.integers(0, 5))):
        name = f"entries/k/{number}"
        used = NOW - draw(ages)
        digests = frozenset(draw(st.sets(st.sampled_from(DIGESTS), max_size=4)))
        file = File((2, number), draw(st.integers(1, 9)), 1, used, used)
        items[name] = Item(frozenset([name]), used, digests, Path(name), (), (file,))
    names = st.sets(st.sampled_from([*items, *(f"blobs/{digest[7:]}" for digest in DIGESTS)]))
    return Inventory(items, blobs, {}, draw(names), draw(names))


limits = st.builds(
    RetentionLimits, st.none() | st.integers(0, 200), st.none() | st.sampled_from([0.0, 60.0, 600.0]), st.just(GRACE),
    st.just(NOW), st.booleans(), st.none(),
)  # fmt: skip


class Model:
    """What is left after the items in `gone` went, found by looking at everything again."""

    def __init__(self, census: Inventory, limits: RetentionLimits) -> None:
        self.census, self.limits = census, limits

    def blobs_gone(self, gone: set[str]) -> set[str]:
        found = set()
        for digest, file in self.census.blobs.items():
            named = any(digest in item.digests for name, item in self.census.items.items() if name not in gone)
            was_named = any(digest in self.census.items[name].digests for name in gone)
            young = abs(NOW - file.modified) < GRACE and not (was_named and self.limits.alone)
            if not named and not young and f"blobs/{digest[7:]}" not in self.census.held:
                found.add(digest)
        return found

    def size(self, gone: set[str]) -> int:
        left = self.blobs_gone(gone)
        return sum(file.size for digest, file in self.census.blobs.items() if digest not in left) + sum(
            file.size for name, item in self.census.items.items() if name not in gone for file in item.files
        )

    def stays(self, name: str) -> bool:
        recent = not self.limits.alone and abs(NOW - self.census.items[name].used) < GRACE
        return name in self.census.pinned or name in self.census.held or recent

    def decide(self) -> set[str]:
        order = sorted(self.census.items, key=lambda name: (self.census.items[name].used, name))
        age, most = self.limits.max_age, self.limits.max_size
        gone = {
            name for name in order
            if age is not None and NOW - self.census.items[name].used > age and not self.stays(name)
        }  # fmt: skip
        if most is None:
            return gone
        taken = []
        for name in order:
            if name not in gone and not self.stays(name) and self.size(gone) > most:
                gone.add(name)
                taken.append(name)
        for name in reversed(taken):
            item = self.census.items[name]
            others = [i.digests for n, i in self.census.items.items() if n not in gone]
            free = all(digest in self.census.blobs and any(digest in o for o in others) for digest in item.digests)
            if free and self.size(gone - {name}) <= most:
                gone.discard(name)
        return gone


def check(census: Inventory, limits: RetentionLimits, plan: CollectionPlan) -> None:
    model = Model(census, limits)
    gone = model.decide()
    assert set(plan.items) == gone
    assert set(plan.blobs) == model.blobs_gone(gone)
    assert plan.size == model.size(gone)
    assert plan.freed + plan.linked == size_of(census) - plan.size
    for name in gone:
        assert name not in census.pinned | census.held
    for name, item in census.items.items():
        if name not in gone:
            assert not item.digests & set(plan.blobs), "what is kept is whole"


@examples(400)
@given(censuses(), limits)
def test_the_decision_is_the_models(census: Inventory, limits: RetentionLimits) -> None:
    check(census, limits, decide(census, limits))


@examples(200)
@given(censuses(), limits, st.data())
def test_named_items_go_whatever_the_limits_and_nothing_else(
    census: Inventory, limits: RetentionLimits, data: st.DataObject
) -> None:
    named = data.draw(st.frozensets(st.sampled_from([*census.items, "entries/k/absent"])))
    plan = decide(census, limits._replace(max_size=None, max_age=None, named=named))
    model = Model(census, limits)
    gone = {name for name in named & census.items.keys() if not model.stays(name)}
    assert set(plan.items) == gone and not plan.quarantine
    theirs = {digest for name in gone for digest in census.items[name].digests}
    assert set(plan.blobs) == model.blobs_gone(gone) & theirs


@examples(100)
@given(censuses(), limits)
def test_carrying_it_out_leaves_nothing_more_to_decide(census: Inventory, limits: RetentionLimits) -> None:
    plan = decide(census, limits)
    left = census._replace(
        items={name: item for name, item in census.items.items() if name not in plan.items},
        blobs={digest: file for digest, file in census.blobs.items() if digest not in plan.blobs},
    )
    doomed = {digest for name in plan.items for digest in census.items[name].digests}
    again = decide(left, limits, doomed)
    assert (again.items, again.blobs, again.size) == ((), (), plan.size)


@full
@examples(100)
@given(censuses(), limits)
def test_what_cannot_be_removed_is_not_tried_again(census: Inventory, limits: RetentionLimits) -> None:
    stuck = dict.fromkeys((*decide(census, limits).items, *decide(census, limits).blobs), "cannot be removed")
    again = decide(census, limits, frozenset(), stuck)
    assert not stuck.keys() & {*again.items, *again.blobs}
