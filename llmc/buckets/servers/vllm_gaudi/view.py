"""A setup as the plug-in's planner sees it: its own names for limits, with what it derives worked out."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.buckets.servers.base import Setup
from llmc.buckets.servers.settings import Setting, Value

PARAMETERS = ("min", "step", "max", "pad_max", "pad_percent")

DIMENSIONS = {
    ("prompt", "bs"): "batch size of prompts",
    ("prompt", "query"): "new tokens of a prompt",
    ("prompt", "ctx"): "context blocks of a prompt",
    ("decode", "bs"): "batch size of decodes",
    ("decode", "block"): "context blocks of all decodes",
}

CLAMP = 3
"""The exponential strategy prepares at most this many times the cache's blocks, where sequences may share some."""


def _range_settings() -> tuple[Setting, ...]:
    """VLLM_{PROMPT,DECODE}_{BS,QUERY,CTX,BLOCK}_BUCKET_*, and SEQ, the old spelling of QUERY (lin and pad alone)."""
    found = []
    for (phase, dimension), words in {**DIMENSIONS, ("prompt", "seq"): "new tokens of a prompt (old)"}.items():
        for parameter in PARAMETERS:
            name = f"{phase}_{dimension}_{parameter}"
            variable = f"VLLM_{phase}_{dimension}_BUCKET_{parameter}".upper()
            found.append(Setting(name, int, None, f"{parameter} of {words}.", variable=variable, least=0))
    return tuple(found)


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "bucketing_strategy", str, "exp", "How buckets are generated.", variable="VLLM_BUCKETING_STRATEGY",
        choices=("exp", "lin", "pad"),
    ),
    Setting(
        "exponential_bucketing", bool, None, "Old: true is exp, false is lin, over the strategy.",
        variable="VLLM_EXPONENTIAL_BUCKETING",
    ),
    Setting("prefix_caching", bool, True, "Prompts reuse cached blocks.", "--enable-prefix-caching"),
    Setting(
        "contiguous_pa", bool, None, "Attention reads all blocks up to the highest; on without prefix caching.",
        variable="VLLM_CONTIGUOUS_PA",
    ),
    Setting("defrag", bool, None, "Blocks are moved down; on with contiguous PA.", variable="VLLM_DEFRAG"),
    Setting("defrag_threshold", int, 32, "Gap that starts it.", variable="VLLM_DEFRAG_THRESHOLD", least=0),
    Setting(
        "num_hpu_blocks", int, None, "Blocks of the KV cache, in the log as \"# HPU blocks\".",
        "--num-gpu-blocks-override", least=1,
    ),
    Setting(
        "num_speculative_tokens", int, 0, "Draft tokens of a step.", "--speculative-config",
        path=("num_speculative_tokens",), least=0,
    ),
    Setting("merged_prefill", bool, False, "All prompts of a step run as one.", variable="VLLM_MERGED_PREFILL"),
    Setting(
        "unbounded_decode_blocks", bool, False,
        "Decode contexts above three times the cache: sliding windows and hybrid models.",
    ),
    Setting("mamba_chunk_size", int, 0, "Chunk of a model with Mamba-like layers.", least=0),
    Setting("mamba_chunk_size_is_explicit", bool, False, "The model's configuration states it."),
    Setting("sdpa_slices", bool, False, "Long prompts in slices.", variable="PT_HPU_SDPA_QKV_SLICE_MODE_FWD"),
    Setting("sdpa_slice", int, 1024, "Tokens of a slice.", variable="PT_HPU_SDPA_BC_FACTOR", least=1),
    Setting("sdpa_threshold", int, 8192, "Prompts from here.", variable="VLLM_FUSEDSDPA_SLIDE_THLD", least=0),
    *_range_settings(),
)  # fmt: skip


@dataclass(frozen=True)
class View:
    """The numbers that the plug-in's rules are written in; `own` has the rest of its settings."""

    own: dict[str, Value]
    model_len: int
    seqs: int
    tokens: int
    block: int
    longest_prompt: int

    @classmethod
    def of(cls, setup: Setup) -> View:
        """The view of `setup`."""
        limits = setup.limits
        return cls(
            dict(setup.own), limits.max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens,
            limits.block_size, limits.longest_prompt,
        )  # fmt: skip

    def number(self, name: str) -> int:
        """A setting that has a number."""
        value = self.own[name]
        if not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}, no number")
        return value

    @property
    def strategy(self) -> str:
        """exp, lin or pad; VLLM_EXPONENTIAL_BUCKETING wins."""
        old = self.own["exponential_bucketing"]
        return str(self.own["bucketing_strategy"]) if old is None else ("exp" if old else "lin")

    @property
    def contiguous(self) -> bool:
        """Contiguous paged attention: off by default where prefix caching is on (features.py, 024a962)."""
        given = self.own["contiguous_pa"]
        return not self.own["prefix_caching"] if given is None else bool(given)

    @property
    def defrag(self) -> bool:
        """The defragmenter: by default with contiguous PA alone (features.py, 024a962)."""
        given = self.own["defrag"]
        return self.contiguous if given is None else bool(given)

    @property
    def merged(self) -> bool:
        """All prompts of a step run as one."""
        return bool(self.own["merged_prefill"])

    @property
    def prefill(self) -> int:
        """Prompts that run together: VLLM_PROMPT_BS_BUCKET_MAX, default 1."""
        given = self.own["prompt_bs_max"]
        return max(1, given) if isinstance(given, int) else 1

    @property
    def prefill_seqs(self) -> int:
        """max_num_prefill_seqs of the planner."""
        return self.seqs if self.merged else self.prefill

    @property
    def drafts(self) -> int:
        """Draft tokens of a step."""
        return self.number("num_speculative_tokens")

    @property
    def blocks_each(self) -> int:
        """Blocks of one sequence of max_model_len."""
        return -(-self.model_len // self.block)

    @property
    def most_context(self) -> int:
        """Most blocks of a prompt's context: the filter's and the fallback's bound."""
        return -(-(self.model_len - 1) // self.block)

    @property
    def pool(self) -> int:
        """num_hpu_blocks; where it is not given, enough for all sequences at their longest, and vLLM's null block."""
        given = self.own["num_hpu_blocks"]
        return given if isinstance(given, int) else self.seqs * self.blocks_each + 1
