"""vLLM's `speculative_config` for the one method that is here.

speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from llmc.errors import InputError, UnknownNameError

METHOD = "ngram"
MAX_TOKENS = 64
LOOKUP_MAX = 4
LOOKUP_MIN = 2


@dataclass(frozen=True)
class SpeculativeConfig:
    """Draft up to `num_speculative_tokens` (1 … MAX_TOKENS) tokens a step by prompt lookup.

    The last `prompt_lookup_max` tokens are looked for, or fewer, down to `prompt_lookup_min`. One that is left out is
    the other (vLLM's rule), both are LOOKUP_MAX and LOOKUP_MIN. Raises InputError for values out of range, and
    UnknownNameError for another method.
    """

    num_speculative_tokens: int
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    method: str = METHOD

    def __post_init__(self) -> None:
        if self.method != METHOD:
            raise UnknownNameError("speculation method", str(self.method), [METHOD])
        for field in fields(self)[:3]:
            value = getattr(self, field.name)
            given = value is not None or field.name == "num_speculative_tokens"
            if given and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InputError(f"speculative_config: {field.name} {value!r} must be a whole number, at least 1")
        if self.num_speculative_tokens > MAX_TOKENS:
            raise InputError(
                f"speculative_config: num_speculative_tokens {self.num_speculative_tokens} is more than {MAX_TOKENS}; "
                "drafts that long are seldom right, 3 to 8 is usual"
            )
        if self.lookup_min > self.lookup_max:
            raise InputError(
                f"speculative_config: prompt_lookup_min {self.lookup_min} is more than prompt_lookup_max "
                f"{self.lookup_max}; swap them, or leave one out"
            )

    @property
    def lookup_max(self) -> int:
        """Tokens of the longest n-gram that is looked for."""
        return self.prompt_lookup_max or self.prompt_lookup_min or LOOKUP_MAX

    @property
    def lookup_min(self) -> int:
        """Tokens of the shortest n-gram that is looked for."""
        return self.prompt_lookup_min or self.prompt_lookup_max or LOOKUP_MIN

    @classmethod
    def of(cls, given: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig | None:
        """From what LLM(speculative_config=…) was given; None stays None.

        vLLM's older spelling of the method, model "[ngram]" or "ngram", is taken. Raises InputError for other keys.
        """
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise InputError(f"speculative_config must be a dict such as {_EXAMPLE}, not {type(given).__name__}")
        values = dict(given)
        if values.get("model") in (METHOD, f"[{METHOD}]"):
            values.setdefault("method", values.pop("model"))
            values["method"] = str(values["method"]).strip("[]")
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise InputError(
                    f"speculative_config knows no key {name!r}; known: {', '.join(known)}. Drafts come from the "
                    f"sequence's own tokens here, never from a second model: {_EXAMPLE}"
                )
        if "num_speculative_tokens" not in values:
            raise InputError(f"speculative_config needs num_speculative_tokens, such as {_EXAMPLE}")
        return cls(**values)

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """From vLLM's `--speculative-config JSON`; raises InputError."""
        try:
            given = json.loads(text)
        except ValueError as e:
            raise InputError(f"--speculative-config {text!r} is not JSON ({e}); give it as {_EXAMPLE}") from None
        found = cls.of(given) if isinstance(given, dict) else None
        if found is None:
            raise InputError(f"--speculative-config {text!r} is not an object; give it as {_EXAMPLE}")
        return found


_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
