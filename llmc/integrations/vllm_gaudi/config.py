"""The plug-in's settings, its derived values, and its bucket file, VLLM_BUCKETING_FROM_FILE.

    file  = line…
    line  = [ "(" axis "," axis "," axis ")" ] [ "#" comment ]       batch, query, context blocks; query 1 is decode
    axis  = number | "[" number, … "]" | "range(" start, stop [, step ] ")"       at most 10,000 numbers

Rules of vllm_gaudi/extension/bucketing/file_strategy.py, August 2026. The server skips any other line with a warning,
or exits; here it is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from llmc.buckets.planner import bucket_file as from_file
from llmc.errors import InputError
from llmc.integrations.base import Lists, Setup, Shape
from llmc.integrations.settings import SPECULATIVE, Setting, Value

PROMPT, DECODE = "prompt", "decode"

PARAMETERS = ("min", "step", "max", "pad_max", "pad_percent")

DIMENSIONS = {
    ("prompt", "bs"): "batch size of prompts",
    ("prompt", "query"): "new tokens of a prompt",
    ("prompt", "ctx"): "context blocks of a prompt",
    ("decode", "bs"): "batch size of decodes",
    ("decode", "block"): "context blocks of all decodes",
}

CLAMP = 3
"""The exponential strategy prepares at most this many times the cache's blocks, since sequences may share some."""


def _range_settings() -> tuple[Setting, ...]:
    """VLLM_{PROMPT,DECODE}_{BS,QUERY,CTX,BLOCK}_BUCKET_*, and SEQ, the old spelling of QUERY (only lin and pad)."""
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
    *SPECULATIVE,
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
class GaudiView:
    """The numbers of the plug-in's rules; `own` has the rest of its settings."""

    own: dict[str, Value]
    model_len: int
    seqs: int
    tokens: int
    block: int
    longest_prompt: int

    @classmethod
    def of(cls, setup: Setup) -> GaudiView:
        """Return the view of `setup`."""
        limits = setup.limits
        return cls(
            dict(setup.own), limits.max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens,
            limits.block_size, limits.longest_prompt,
        )  # fmt: skip

    def number(self, name: str) -> int:
        """Return a setting that has a number."""
        value = self.own[name]
        if not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}, which is not a number")
        return value

    @property
    def strategy(self) -> str:
        """exp, lin or pad; VLLM_EXPONENTIAL_BUCKETING takes precedence."""
        old = self.own["exponential_bucketing"]
        return str(self.own["bucketing_strategy"]) if old is None else ("exp" if old else "lin")

    @property
    def contiguous(self) -> bool:
        """Contiguous paged attention: off by default where prefix caching is on (features.py, 024a962)."""
        given = self.own["contiguous_pa"]
        return not self.own["prefix_caching"] if given is None else bool(given)

    @property
    def defrag(self) -> bool:
        """The defragmenter: by default only with contiguous PA (features.py, 024a962)."""
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
        """Most blocks of a prompt's context: the bound of the filter and of the fallback."""
        return -(-(self.model_len - 1) // self.block)

    @property
    def pool(self) -> int:
        """num_hpu_blocks; by default enough for all sequences at their longest, plus vLLM's null block."""
        given = self.own["num_hpu_blocks"]
        return given if isinstance(given, int) else self.seqs * self.blocks_each + 1


BUCKET_FILE = "buckets.txt"
MOST_OF_A_RANGE = 10_000
"""Length of the longest range that the server expands."""

_RANGE = re.compile(r"range\(([^)]*)\)")
_SHORTEST_RANGE = 4


def read_buckets(text: str, source: str) -> Lists:
    """Return the buckets of a file's `text`, by family; `source` names it in messages.

    Raises InputError, naming source, line and column, for a line that the server would skip, or exit on.
    """
    buckets = from_file.values(text, source)
    for number, line in enumerate(text.splitlines(), 1):
        code = line.partition("#")[0]
        rest = code
        for found in _RANGE.finditer(code):
            _check_range(found[1], f"{source}:{number}:{found.start() + 1}")
            rest = rest.replace(found[0], "0")
        if rest.count("(") > 1:
            column = rest.index("(", rest.index("(") + 1) + 1
            raise InputError(f"{source}:{number}:{column}: the server reads no tuple here; write a list, as in [1, 2]")
    return {
        PROMPT: tuple(sorted({bucket for bucket in buckets if bucket[1] != 1})),
        DECODE: tuple(sorted({bucket for bucket in buckets if bucket[1] == 1})),
    }


def _check_range(arguments: str, location: str) -> None:
    words = [word.strip() for word in arguments.split(",")]
    if len(words) < 2:
        raise InputError(f"{location}: the server skips a range of one number; write range(start, stop)")
    if all(word.isdigit() for word in words) and len(words) <= 3:
        start, stop, step = (*map(int, words), 1)[:3]
        if step and len(range(start, stop, step)) > MOST_OF_A_RANGE:
            raise InputError(
                f"{location}: the server skips a range of more than {MOST_OF_A_RANGE} numbers; raise its step"
            )


def write_buckets(lists: Lists, notes: Sequence[str] = ()) -> str:
    """Return a file that lists exactly the buckets of `lists`, after `notes` as comments."""
    lines = [f"# {note}" for note in notes]
    for family, axes in ((PROMPT, "batch, query, context blocks of one sequence"),
                         (DECODE, "batch, 1, blocks of the whole batch")):  # fmt: skip
        lines.append(f"# {family}: {axes}")
        lines += _lines(lists[family])
    return "\n".join(lines) + "\n"


def _lines(shapes: Iterable[Shape]) -> list[str]:
    """One line for all batches and queries with the same contexts, where their product is exactly the buckets."""
    contexts: dict[tuple[int, int], list[int]] = {}
    for batch, query, context in sorted(shapes):
        contexts.setdefault((batch, query), []).append(context)
    queries: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for (batch, query), blocks in contexts.items():
        queries.setdefault((batch, tuple(blocks)), []).append(query)
    batches: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for (batch, values), requested in queries.items():
        batches.setdefault((tuple(requested), values), []).append(batch)
    return [f"({_axis(rows)}, {_axis(requested)}, {_axis(values)})" for (requested, values), rows in batches.items()]


def _axis(values: Sequence[int]) -> str:
    """Numbers as one number, a range where they are many and evenly spaced, or a list."""
    if len(values) == 1:
        return str(values[0])
    step = values[1] - values[0]
    if _SHORTEST_RANGE <= len(values) <= MOST_OF_A_RANGE:
        even = range(values[0], values[-1] + 1, step)
        if list(even) == list(values):
            return f"range({values[0]}, {values[-1] + 1}" + (")" if step == 1 else f", {step})")
    return str(list(values))


def bucket_file(environment: Mapping[str, str], files: Mapping[str, str]) -> tuple[str, str] | None:
    """Return (name, text) of the file that VLLM_BUCKETING_FROM_FILE names, or of buckets.txt or the only .txt file.

    None without a file. Raises InputError where the variable names a missing file.
    """
    named = environment.get("VLLM_BUCKETING_FROM_FILE")
    if not named:
        texts = [name for name in files if name.endswith(".txt")]
        name = BUCKET_FILE if BUCKET_FILE in files else texts[0] if len(texts) == 1 else None
        return None if name is None else (name, files[name])
    for name, text in files.items():
        if name == named or name.rpartition("/")[2] == named.rpartition("/")[2]:
            return name, text
    raise InputError(f"VLLM_BUCKETING_FROM_FILE names {named}, which is not there; give that file too")
