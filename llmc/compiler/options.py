"""Compile options: those that all targets share, and those that a target declares itself.

A target declares its own options as `Option`s (targets/base.py, `options`). The flag, its help and check, the Python
keyword, the key component and the manifest entry are derived from them. No code above a target knows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Generic, TypeAlias, TypeVar

from llmc.errors import CompileError, InputError, UnknownNameError

QUANTISATIONS = ("none", "int8", "fp8", "int4", "keep")
DTYPES = ("auto", "f32", "bf16", "f16")
VERIFY = ("sample", "all", "none")
LOCAL = "local"
EXECUTORS = (LOCAL, "ray")
"""Names of the executors (pipeline/executors/)."""
MAX_TOP_K = 256

OptionValue: TypeAlias = bool | int | float | str
T_co = TypeVar("T_co", bound=OptionValue | None, covariant=True)


def flag_of(name: str) -> str:
    """Flag of an option or a keyword: "--group-size" for "group_size"."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Option(Generic[T_co]):
    """An option that only some targets take: its value is of type `kind`, and `default` where none is given.

    `choices`: all values of an option with a few. `least`: the smallest number. `is_size`: a number of bytes, which the
    command line takes as in "1G". `shapes_executable`: executables depend on it, which puts it into their keys; the
    manifest holds all options. `metavar`, `help`: for the command line; `what`: its name in the error for an unknown
    choice.
    """

    name: str
    kind: type[bool] | type[int] | type[float] | type[str]
    default: T_co
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    least: int | None = None
    is_size: bool = False
    shapes_executable: bool = True
    what: str = ""

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return flag_of(self.name)

    def of(self, options: CompileOptions) -> T_co:
        """The option's value in `options`."""
        found: T_co = options.own.get(self.name, self.default)  # type: ignore[assignment]
        return found

    def check(self, value: OptionValue) -> None:
        """Raise InputError for an invalid value, and UnknownNameError for an unknown choice."""
        fits = isinstance(value, (int, float) if self.kind is float else self.kind)
        if not fits or (isinstance(value, bool) and self.kind is not bool):
            raise InputError(f"{self.flag} {value!r} must be of type {self.kind.__name__}")
        if self.choices and value not in self.choices:
            raise UnknownNameError(self.what or self.name.replace("_", " "), str(value), self.choices)
        if self.least is not None and not isinstance(value, str) and value < self.least:
            bound = "not be negative" if self.least == 0 else f"be at least {self.least}"
            raise InputError(f"{self.flag} {value} must {bound}")


@dataclass(frozen=True)
class CompileOptions:
    """Options of one compile; the target decides those that are `None`, and dtype "auto", and says what and why.

    `sample_top_k` (0 … MAX_TOP_K): how many of the largest logits, with their ids, graphs return next to all of them.
    `executor`: where executables are compiled, `jobs` at once; of a cluster its `address`, and the memory in bytes that
    one executable takes there. `own`: given values of options that targets declare, by name. `of` and `changed` sort
    options into shared and own ones, and `Target.configure` checks them. Raises UnknownNameError, listing the known
    names, for an unknown name, and InputError for a number out of range.
    """

    device: str = "cpu"
    quantize: str | None = None
    dtype: str = "auto"
    specialise: bool | None = None
    verify: str = "sample"
    require_native: bool = False
    jobs: int = 1
    sample_top_k: int = 0
    own: Mapping[str, OptionValue] = field(default_factory=dict)
    executor: str = LOCAL
    address: str | None = None
    worker_memory: int | None = None

    def __post_init__(self) -> None:
        if self.quantize is not None and self.quantize not in QUANTISATIONS:
            raise UnknownNameError("quantisation", self.quantize, QUANTISATIONS)
        if self.dtype not in DTYPES:
            raise UnknownNameError("dtype", self.dtype, DTYPES)
        if self.verify not in VERIFY:
            raise UnknownNameError("verification mode", self.verify, VERIFY)
        if self.executor not in EXECUTORS:
            raise UnknownNameError("executor", self.executor, EXECUTORS)
        if self.jobs < 1:
            raise InputError(f"jobs {self.jobs} must be at least 1")
        if not 0 <= self.sample_top_k <= MAX_TOP_K:
            raise InputError(f"--sample-top-k {self.sample_top_k} must be in 1 … {MAX_TOP_K}, or 0 for all logits only")

    @classmethod
    def of(cls, device: str = "cpu", **given: Any) -> CompileOptions:
        """Options for `device` from shared options and targets' own ones by name; None stands for not given."""
        return cls(device).changed(**given)

    def changed(self, **given: Any) -> CompileOptions:
        """Copy with these values, shared and own ones alike; None removes an own one."""
        shared = {name: value for name, value in given.items() if name in SHARED}
        own = {name: value for name, value in {**self.own, **given}.items() if name not in SHARED and value is not None}
        return replace(self, **shared, own=own)

    def get(self, name: str) -> OptionValue | None:
        """Given value of an option by name, shared or own; None if none was given."""
        found: OptionValue | None = getattr(self, name) if name in SHARED else self.own.get(name)
        return found

    def to_dict(self) -> dict[str, Any]:
        """All options by name, in one level, as `of` takes them."""
        found = asdict(self)
        own: dict[str, Any] = found.pop("own")
        return found | own

    @property
    def extensions(self) -> dict[str, OptionValue]:
        """Options that a manifest names only if they are used."""
        return {**({"sample_top_k": self.sample_top_k} if self.sample_top_k else {}), **self.own}

    def require_vocabulary(self, model: str, size: int) -> None:
        """Raise InputError when more top logits are requested than `model` has tokens."""
        if self.sample_top_k > size:
            raise InputError(f"--sample-top-k {self.sample_top_k}: {model} has {size} tokens; request at most as many")


SHARED = tuple(f.name for f in fields(CompileOptions) if f.name != "own")
"""Names of the options that every target takes."""


class UnfitError(CompileError):
    """The chosen options do not fit the model: `why`. `instead`: options that fit.

    If the user did not request the options that do not fit, a compile continues with `instead` and says why.
    """

    def __init__(self, why: str, advice: str, **instead: Any) -> None:
        super().__init__(f"{why}; {advice}")
        self.why = why
        self.instead = instead
