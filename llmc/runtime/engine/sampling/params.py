"""A request's sampling parameters: what to draw, when to stop, which form the text must have, what to return."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, fields
from enum import Enum
from typing import Any, Self

from llmc.errors import InputError, UnknownNameError
from llmc.runtime.engine.sampling import checks

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy, as in vLLM."""
MAX_CHOICES = 1024
"""The largest n and best_of."""
MAX_LOGPROBS = 20
"""The largest number of top log probabilities per token."""
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters that a checkpoint's generation_config.json may recommend; the same as vLLM's."""
KINDS = ("json", "regex", "choice", "grammar", "json_object")
MAX_CHOICE = 4096
"""The largest number of texts in `choice`."""
MAX_SOURCE = 256 << 10
"""The largest number of characters of a schema, expression or grammar, or of all texts of a choice together."""
_SEEDS = 1 << 64


class RequestOutputKind(Enum):
    """Contents of each streamed output: everything so far, only the new part, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that a text must have: exactly one of the fields, with vLLM's names.

    Raises InputError for no field, several fields, or a value of the wrong type. Schemas, regular expressions and
    grammars are validated when they are compiled.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or parsed; kept as text."""
    regex: str | None = None
    """A regular expression that the whole text matches (the Rust regex crate's syntax)."""
    choice: Sequence[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A grammar in llguidance's dialect of Lark, whose first rule is `start`."""
    json_object: bool | None = None
    """Any JSON object."""

    def __post_init__(self) -> None:
        if self.json_object is not None:
            checks.boolean("json_object", self.json_object)
        given = self._given()
        if len(given) != 1:
            raise InputError(
                f"structured_outputs takes exactly one of {', '.join(KINDS)}; it has {' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _unicode(name, getattr(self, name))
        if self.choice is not None:
            choice = checks.texts("structured_outputs.choice", checks.listed("structured_outputs.choice", self.choice))
            if not 1 <= len(choice) <= MAX_CHOICE:
                raise InputError(f"structured_outputs.choice must name 1 to {MAX_CHOICE} texts, not {len(choice)}")
            for text in choice:
                _unicode("choice", text)
            object.__setattr__(self, "choice", choice)

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return self._given()[0]

    def _given(self) -> list[str]:
        return [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]


GuidedDecodingParams = StructuredOutputsParams
"""vLLM's older name."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, when to stop and what to return, with vLLM's names and defaults.

    Raises InputError naming the field of an invalid value. After construction, sequences are tuples, `top_k` is 0
    instead of -1, and `guided_decoding` (vLLM's older name) has become `structured_outputs`.
    """

    max_tokens: int | None = 16
    """The largest number of tokens to generate; None: as many as the context allows."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the most probable tokens that together reach this probability, in (0, 1]."""
    top_k: int = 0
    """Keep this many most probable tokens; 0 or -1: all."""
    min_p: float = 0.0
    """Keep tokens at least this probable relative to the most probable, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive logits and multiplies negative ones of tokens in prompt and output; values over 1 discourage."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time a token is in the output, in [-2, 2]."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these ids, in [-100, 100]."""
    seed: int | None = None
    """Makes the draws repeatable; None: different each time."""
    stop: str | Sequence[str] | None = None
    """Text is cut before the first of these (`StopChecker`)."""
    stop_token_ids: Sequence[int] | None = None
    """Ids that end the text, in addition to the model's own."""
    ignore_eos: bool = False
    """Continue after the model's end token."""
    min_tokens: int = 0
    """No end or stop token before this many tokens, unless nothing else is allowed."""
    n: int = 1
    """Choices to return, up to MAX_CHOICES. Must be 1 if greedy, which has only one."""
    best_of: int | None = None
    """Choices to generate, of which the n most probable are returned; None: n."""
    typical_p: float = 1.0
    """Locally typical sampling: keep the tokens with surprise nearest to the expected one that together reach this
    probability, in (0, 1] (Meister et al. 2022).
    """
    logprobs: int | None = None
    """Return log probabilities of the chosen token and of this many most probable ones, 0 … 20."""
    prompt_logprobs: None = None
    """Not available: compiled graphs return the logits of the last token only."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    kept_special_ids: Sequence[int] | None = None
    """Special tokens that stay in the text nevertheless."""
    include_stop_str_in_output: bool = False
    """Let the text end with the stop string or stop token that ended it."""
    allowed_token_ids: Sequence[int] | None = None
    """Choose among these only."""
    forced_token_ids: Sequence[int] | None = None
    """The output's first tokens, in place of chosen ones. With logprobs, they get the model's log probabilities."""
    bad_words: Sequence[str] | None = None
    """Never complete one of these, at the start of a word or of the text."""
    truncate_prompt_tokens: int | None = None
    """Use only this many last tokens of the prompt."""
    detokenize: bool = True
    """Whether to convert the tokens to text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output of a stream holds."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the text must have."""
    guided_decoding: InitVar[StructuredOutputsParams | None] = None

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Remember which parameters are given; the others may take a device's defaults (`filled`)."""
        built = super().__new__(cls)
        built.__dict__["_given"] = frozenset(named).union(f.name for f in fields(cls)[: len(values)])
        return built

    def __post_init__(self, guided_decoding: StructuredOutputsParams | None) -> None:
        values = self.__dict__
        for name, default, check in _CHECKS:
            value = values[name]
            if value is not default:
                values[name] = check(name, value)
        values["top_k"] = max(0, self.top_k)
        for name in ("stop", "stop_token_ids", "bad_words", "kept_special_ids", "forced_token_ids"):
            values[name] = values[name] or ()
        if guided_decoding is not None:
            if self.structured_outputs is not None:
                raise InputError("guided_decoding is the older name of structured_outputs; give one of them")
            values["structured_outputs"] = _structured("guided_decoding", guided_decoding)
        self._check_together()

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.best_of is not None and self.best_of < self.n:
            raise InputError(f"best_of {self.best_of} is less than n {self.n}")
        if self.choices > 1 and self.greedy:
            name = "n" if self.n > 1 else "best_of"
            raise InputError(
                f"{name} must be 1 at temperature 0, not {self.choices}: greedy choices are all the same; "
                "set a temperature or request one"
            )
        if self.stop and not self.detokenize:
            raise InputError("stop needs detokenize: stop strings are looked for in the text; use stop_token_ids")
        if self.allowed_token_ids is not None and self.structured_outputs is not None:
            raise InputError("allowed_token_ids and structured_outputs may contradict each other; give one of them")

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Parameters from a request, where None means the default (except max_tokens=None: no limit).

        Raises UnknownNameError for an unknown parameter name.
        """
        for name in values:
            if name not in _NAMES:
                raise UnknownNameError("sampling parameter", name, _NAMES)
        return cls(**{name: v for name, v in values.items() if v is not None or name == "max_tokens"})

    def clone(self) -> SamplingParams:
        """A copy that shares no mutable value."""
        bias = None if self.logit_bias is None else dict(self.logit_bias)
        return self._with(logit_bias=bias)

    def child(self, index: int) -> SamplingParams:
        """The parameters of choice `index`: n is 1, and a seed is increased by `index`."""
        seed = self.seed
        if seed is not None and (seed := seed + index) >= _SEEDS:
            seed -= _SEEDS
        return self._with(n=1, best_of=None, seed=seed)

    def _with(self, **values: Any) -> SamplingParams:
        built = object.__new__(SamplingParams)
        built.__dict__.update(self.__dict__, **values)
        return built

    def filled(self, defaults: Mapping[str, float | int]) -> SamplingParams:
        """A copy with these values for parameters that were not given."""
        given: frozenset[str] = self.__dict__["_given"]
        return self._with(**{name: value for name, value in defaults.items() if name not in given})

    @property
    def choices(self) -> int:
        """Sequences to generate: best_of, or n."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return tuple(self.stop or ())

    @property
    def penalises(self) -> bool:
        """Whether a penalty depends on the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def adjusts_logits(self) -> bool:
        """Whether penalties or biases apply."""
        return self.penalises or bool(self.logit_bias)


def recommended(stated: Any) -> dict[str, float | int]:
    """Return the RECOMMENDED parameters among `stated` that are valid, ready for `SamplingParams.filled`."""
    found: dict[str, float | int] = {}
    for name in RECOMMENDED if isinstance(stated, Mapping) else ():
        if type(stated.get(name)) in (int, float):
            with contextlib.suppress(InputError):
                found[name] = getattr(SamplingParams(**{name: stated[name]}), name)
    return found


def _unicode(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise InputError(f"structured_outputs.{name} must be a text, not {value!r:.80}")
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise InputError(f"structured_outputs.{name} holds a lone surrogate: not Unicode")


def _schema(value: Any) -> str:
    """The schema as canonical text, so that equal schemas are compiled once."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else dict(value)
        if not isinstance(parsed, dict):
            raise TypeError(f"a JSON schema is an object, not {parsed!r:.40}")
        return json.dumps(parsed, allow_nan=False)
    except RecursionError:
        raise InputError("structured_outputs.json is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"structured_outputs.json is no JSON schema: {error!s:.200}") from None


_structured = checks.instance_of(StructuredOutputsParams)


def _allowed(name: str, value: Any) -> tuple[int, ...]:
    ids = checks.token_ids(name, value)
    if not ids:
        raise InputError(f"{name} must name at least one id")
    return ids


def _no_prompt_logprobs(name: str, value: Any) -> None:
    raise InputError(
        f"{name} is not available (requested {value!r:.20}): compiled graphs return the logits of the last token only"
    )


_CHECKED: dict[str, checks.Check] = {
    "max_tokens": checks.optional(checks.integer(1)),
    "min_tokens": checks.integer(0),
    "temperature": checks.number(0.0),
    "top_p": checks.number(0.0, 1.0, open_below=True),
    "top_k": checks.integer(-1),
    "min_p": checks.number(0.0, 1.0),
    "repetition_penalty": checks.number(0.0, math.inf, open_below=True),
    "presence_penalty": checks.number(-2.0, 2.0),
    "frequency_penalty": checks.number(-2.0, 2.0),
    "logit_bias": checks.biases,
    "seed": checks.integer(-(1 << 63), _SEEDS - 1),
    "stop": checks.texts,
    "stop_token_ids": checks.token_ids,
    "ignore_eos": checks.boolean,
    "n": checks.integer(1, MAX_CHOICES),
    "best_of": checks.integer(1, MAX_CHOICES),
    "typical_p": checks.number(0.0, 1.0, open_below=True),
    "logprobs": checks.integer(0, MAX_LOGPROBS),
    "prompt_logprobs": _no_prompt_logprobs,
    "skip_special_tokens": checks.boolean,
    "kept_special_ids": checks.token_ids,
    "include_stop_str_in_output": checks.boolean,
    "allowed_token_ids": _allowed,
    "forced_token_ids": checks.token_ids,
    "bad_words": checks.texts,
    "truncate_prompt_tokens": checks.integer(1),
    "detokenize": checks.boolean,
    "output_kind": checks.instance_of(RequestOutputKind),
    "structured_outputs": _structured,
}
_CHECKS = tuple((f.name, f.default, _CHECKED[f.name]) for f in fields(SamplingParams))
_NAMES = frozenset(_CHECKED) | {"guided_decoding"}
