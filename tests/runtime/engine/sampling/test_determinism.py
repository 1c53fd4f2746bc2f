"""The same tokens for a seed, whatever else is in the batch and wherever the logits lie."""

from __future__ import annotations

import numpy as np

from llmc.runtime.engine.sampling.batch import sample
from tests.runtime.engine.sampling.reference import VOCAB, logits, sampler

KINDS = [
    {},
    {"top_p": 0.9},
    {"top_k": 30, "repetition_penalty": 1.2},
    {"temperature": 0},
    {"min_p": 0.05, "temperature": 1.3},
    {"typical_p": 0.8},
    {"frequency_penalty": 0.5, "temperature": 0},
    {"top_k": 7, "logprobs": 3},
    {"allowed_token_ids": range(500)},
    {"min_tokens": 9, "end": [1, 2]},
]


def run(names, steps=12, vocab=3001):
    """Ids and logprobs by name of each sequence in a batch; each has logits of its own."""
    batch = [sampler(vocab=vocab, seed=name, **KINDS[name]) for name in names]
    out = {name: [] for name in names}
    for step in range(steps):
        rows = np.concatenate([logits(1, vocab, seed=97 * name + step) for name in names])
        samples = sample(rows, batch)
        for name, index, logprobs in zip(names, samples.ids, samples.logprobs, strict=True):
            out[name].append((index, logprobs))
    return out


def test_a_seed_gives_the_same_tokens_in_any_batch():
    alone = {name: run([name])[name] for name in range(len(KINDS))}
    assert run(range(len(KINDS))) == alone
    order = np.random.default_rng(0)
    for _ in range(4):
        names = order.permutation(len(KINDS))[:5].tolist()
        assert run(names) == {name: alone[name] for name in names}


def test_rows_of_a_wider_buffer_are_the_same_rows():
    """Executors hand out views; neither strides nor alignment may matter."""
    wide = np.zeros((3, 5000 + 3), np.float32)
    rows = logits(3, 5000, seed=8)
    wide[:, 3:] = rows
    for kind in ({"top_p": 0.9}, {}, {"top_k": 40}, {"temperature": 0}):
        built = [[sampler(vocab=5000, seed=i, **kind) for i in range(3)] for _ in range(2)]
        assert sample(wide[:, 3:], built[0]) == sample(rows, built[1])


def test_seeds_matter_and_no_seed_differs():
    def draws(seed):
        one = sampler(seed=seed, max_tokens=None)
        return [sample(logits(spread=0.1), [one]).ids[0] for _ in range(8)]

    assert draws(1) == draws(1) != draws(2)
    assert draws(None) != draws(None)
    assert draws(-1) == draws((1 << 64) - 1)


def test_one_number_a_token_whatever_the_filters():
    """Filters may change between requests of a seed without shifting later draws."""
    built = [sampler(seed=3, vocab=VOCAB, **kind) for kind in KINDS if "temperature" not in kind]
    for _ in range(5):
        sample(logits(len(built)), built)
    assert len({one.uniform() for one in built}) == 1
