"""The accuracy of a bundle: how close its predictions are to the reference's over the text of texts.py.

The text is teacher-forced: whatever a bundle predicts, the next token is the text's. The first FIRST tokens of a window
are a prompt, and the others are decoded one by one. Several windows run at once, in the buckets that an engine would
choose. An executor that scores every token of a step takes the first half of each window as a prompt, which covers both
phases. All executors read the same positions, if the plan permits, and so give comparable figures. A host replays
portable executables operator by operator. They read only the last PORTABLE positions of each part of the text, with the
tokens before them as a prompt.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.plan import Plan
from llmc.compiler.verification.limits import AccuracyLimits
from llmc.compiler.verification.probes import STEP, UNLIKELY, TextWindow, by_part, text_digest
from llmc.compiler.verification.steps import decode_step, empty, fitting, prompt_chunk, prompt_steps
from llmc.compiler.verification.texts import TEXTS
from llmc.errors import VerificationError
from llmc.runtime.executors.base import Executor
from llmc.runtime.step import exact

TIE = 2e-3
"""Logit margin of the reference's best two below which either is right: float32 sums differ in their last digits."""


def kl_divergence(reference: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """KL(reference ‖ other) in nats, of the softmax of two logit rows [V]."""
    p, q = log_softmax(reference), log_softmax(other)
    return max(0.0, float((np.exp(p) * (p - q)).sum()))


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Log probabilities over the last axis, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def tied(reference: NDArray[np.float32], token: int) -> bool:
    """Whether `token` is as good as the best of the reference's logits [V]: their margin is within rounding."""
    return bool(reference.max() - reference[token] < TIE)


_LOGITS = 1 << 22
"""Logits that are compared at once: 32 MiB in float64."""

PORTABLE = 16

Scored = tuple[list[tuple[int, int]], NDArray[np.float32]]
"""(window, position) of each row, and the logits after it [rows, V], valid until the next step."""


def measure(plan: Plan, executor: Executor, windows: Sequence[TextWindow], last: int | None = None) -> dict[str, Any]:
    """Mean and 99th percentile of KL(reference ‖ bundle) in nats, and the top-1 agreement, over the text.

    The percentile is the smallest divergence that at least 99% of the positions do not exceed. Top-1 tokens agree where
    the reference prefers no other by more than float32 sums differ (divergence.TIE). Perplexity is e to the mean of
    −log p of the text's own next token, where a window has one; None where none has. `parts` has the mean of each part
    of the text, `text` the digest of the tokens read. `last`: read only so many positions at the end of each part, and
    no more of any window; None: all.
    """
    read: list[list[int]] = [[] for _ in windows]
    kl: list[list[float]] = [[] for _ in windows]
    equal: list[bool] = []
    surprise: list[NDArray[np.float64]] = []
    for offsets, logits in _scored(plan, executor, windows, last):
        kept = [
            (row, w, gaps) for row, (w, at) in enumerate(offsets) if (gaps := windows[w].gaps_after(at)) is not None
        ]
        if not kept:
            continue
        rows, gaps = [row for row, _, _ in kept], np.stack([gaps for _, _, gaps in kept])
        divergence, same = compare(gaps, logits[rows])
        nexts = [windows[w].tokens[offsets[row][1] + 1 :][:1] for row, w, _ in kept]
        reported = [at for at, token in enumerate(nexts) if len(token)]
        surprise.append(
            surprises(gaps[reported], logits[rows][reported], np.array([nexts[at][0] for at in reported], np.int64))
        )
        for (row, w, _), d in zip(kept, divergence.tolist(), strict=True):
            read[w].append(offsets[row][1])
            kl[w].append(d)
        equal += same.tolist()
    every = np.sort([d for found in kl for d in found])
    wanted, got = np.concatenate(surprise, axis=1)
    return {
        "tokens": len(every),
        "mean_kl": float(every.mean()),
        "p99_kl": float(every[-(-99 * len(every) // 100) - 1]),
        "max_kl": float(every[-1]),
        "top1": float(np.mean(equal)),
        "perplexity": float(np.exp(got.mean())) if got.size else None,
        "reference_perplexity": float(np.exp(wanted.mean())) if got.size else None,
        "parts": {part: float(np.mean([d for w in at for d in kl[w]])) for part, at in by_part(windows)},
        "text": text_digest(windows, read),
    }


def compare(gaps: NDArray[np.uint16], logits: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """KL(reference ‖ logits) of each row in nats, and whether its best token is the reference's; gaps, logits [n, V].

    The divergence is NaN where a row's logits contain NaN.
    """
    p = log_softmax(gaps * -STEP)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        difference = np.where(gaps == UNLIKELY, 0.0, p - log_softmax(logits))
        divergence = np.maximum(0.0, (np.exp(p) * difference).sum(-1))
    best = logits.argmax(-1)[:, None]
    equal: NDArray[np.bool_] = np.take_along_axis(gaps, best, -1)[:, 0] * STEP < TIE
    return divergence, equal


def surprises(
    gaps: NDArray[np.uint16], logits: NDArray[np.float32], tokens: NDArray[np.int64]
) -> NDArray[np.float64]:  # fmt: skip
    """−log p of a token after each row, by the reference and by the logits, [2, n] in nats; gaps, logits [n, V].

    No token is less likely than those that gaps do not distinguish.
    """
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        both = (log_softmax(gaps * -STEP), log_softmax(logits))
    found = np.stack([-np.take_along_axis(p, tokens[:, None], -1)[:, 0] for p in both])
    return np.minimum(found, UNLIKELY * STEP)


def check(found: Mapping[str, Any], limits: AccuracyLimits) -> None:
    """Raise VerificationError, with the figures of `measure`, beyond `limits`."""
    top1 = least_equal(limits.top1, found["tokens"])
    if found["mean_kl"] <= limits.mean_kl and found["top1"] >= top1:
        return
    what_to_do = "that is too coarse for this model: choose a finer --quantize or --dtype (none and f32 are exact)"
    if limits.greedy_equal:
        what_to_do = "the compiled graphs are wrong for this model"
    raise VerificationError(
        f"over {found['tokens']} tokens of text the bundle differs from the reference model by a mean KL of "
        f"{found['mean_kl']:.2g} nats (limit {limits.mean_kl:.2g} for {limits.quality}; p99 {found['p99_kl']:.2g}), "
        f"top-1 agreement {found['top1']:.1%} (limit {top1:.0%}); {what_to_do}"
    )


def least_equal(share: float, rows: int) -> float:
    """Least top-1 agreement for `rows`: two standard deviations below the limit, for few rows."""
    return float(share - 2 * (share * (1 - share) / rows) ** 0.5)


def _scored(plan: Plan, executor: Executor, windows: Sequence[TextWindow], last: int | None) -> Iterator[Scored]:
    """Every position from each window's first on, or its `last` ones, with the bundle's logits after it."""
    order = sorted(_read(windows, last), key=lambda w: -len(windows[w].tokens))
    while order:
        empty(executor)
        group = order[: _together(plan, executor, [len(windows[w].tokens) for w in order])]
        order = order[len(group) :]
        first = int(windows[group[0]].positions[0]) + 1
        if last is not None:
            first = max(first, len(windows[group[-1]].tokens) - last + 1)
        done = yield from _prompts(plan, executor, windows, group, first)
        for at in range(done, len(windows[group[0]].tokens)):
            group = [w for w in group if at < len(windows[w].tokens)]
            tokens = [int(windows[w].tokens[at]) for w in group]
            logits = executor.run(decode_step(plan, executor, tokens, [at] * len(group)))
            yield [(w, at) for w in group], logits[: len(group)]


def _read(windows: Sequence[TextWindow], last: int | None) -> Iterable[int]:
    """The windows to read: all, or the last of each part that have `last` positions together.

    Where the text has fewer parts than TEXTS, each stands for several of them.
    """
    if last is None:
        return range(len(windows))
    parts, read = by_part(windows), []
    for _, at in parts:
        left = last * len(TEXTS) // len(parts)
        while at and left > 0:
            read.append(at.pop())
            left -= min(last, len(windows[read[-1]].tokens) - int(windows[read[-1]].positions[0]))
    return sorted(read)


def _together(plan: Plan, executor: Executor, lengths: Sequence[int]) -> int:
    """Number of windows that decode at once: longest first, as many as there are slots, buckets and room for."""
    count = max(1, min(plan.limits.max_num_seqs, fitting(executor, lengths)))
    while count > 1 and not executor.capabilities.exact and plan.lookup("decode", count, 1, lengths[0] - 1) is None:
        count -= 1
    return count


def _prompts(
    plan: Plan, executor: Executor, windows: Sequence[TextWindow], group: Sequence[int], first: int
) -> Generator[Scored, None, int]:
    """Prefill `first` tokens or more of each of the windows of `group`; returns how many each of the slots then holds.

    Slots are the first ones. Logits come after the last token, or after every one where the executor gives them.
    """
    if not executor.capabilities.scores_each:
        for slot, w in enumerate(group):
            for step in prompt_steps(plan, executor, slot, windows[w].tokens[:first].tolist()):
                logits = executor.run(step)
            yield [(w, first - 1)], logits[:1]
        return first
    end = max(first, len(windows[group[-1]].tokens) // 2)
    together = len(group) if executor.capabilities.ragged else 1
    most = min(prompt_chunk(plan, executor), _LOGITS // windows[0].gaps.shape[1])
    for begin in range(0, len(group), together):
        rows = group[begin : begin + together]
        slots = range(begin, begin + len(rows))
        chunk = max(1, most // len(rows))
        for start in range(0, end, chunk):
            at = range(start, min(end, start + chunk))
            tokens = [windows[w].tokens[at.start : at.stop].tolist() for w in rows]
            logits = executor.run_each(exact("prompt", slots, tokens, [start] * len(rows)))
            yield [(w, position) for w in rows for position in at], logits
    return end
