"""Setups of vLLM on Gaudi, given and random."""

from __future__ import annotations

from hypothesis import strategies as st

from llmc.integrations import bucket_rules
from llmc.integrations.base import Setup
from llmc.integrations.settings import Value, complete
from llmc.integrations.vllm_gaudi.config import GaudiView

GAUDI = bucket_rules("vllm-gaudi")


def setup(
    max_model_len: int = 8192, max_num_seqs: int = 32, tokens: int = 2048, block_size: int = 128, **own: Value
) -> Setup:
    limits = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(tokens, max_num_seqs),
        "block_size": min(block_size, max_model_len),
    }
    return Setup(GAUDI.limits(limits), complete(GAUDI.settings, own))


def view(**given: Value) -> GaudiView:
    return GaudiView.of(setup(**given))  # type: ignore[arg-type]


@st.composite
def setups(draw: st.DrawFn, most_len: int = 40_000, **fixed: Value) -> Setup:
    """Any limits, with and without contiguous PA, a known cache and drafts."""
    own: dict[str, Value] = {
        "contiguous_pa": draw(st.booleans()),
        "num_hpu_blocks": draw(st.one_of(st.none(), st.integers(8, 20_000))),
        "num_speculative_tokens": draw(st.sampled_from([0, 0, 0, 1, 3])),
        "prompt_bs_max": draw(st.sampled_from([None, 1, 2, 5])),
        **fixed,
    }
    return setup(
        draw(st.integers(300, most_len)), draw(st.integers(1, 300)), draw(st.integers(128, 9000)),
        draw(st.sampled_from([16, 128, 528])), **own,
    )  # fmt: skip
