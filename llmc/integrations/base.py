"""The contract of an integration: where its parts are, and its bucket rules: which graphs a server prepares and takes.

The contract of a compile cache is artifacts/third_party/base.py, that of a log buckets/traffic/formats/base.py.

A server counts graphs in families of its own: vLLM on CUDA has one list, of tokens a step; vLLM on Gaudi has prompt
graphs of (batch, query, context blocks) and decode graphs of (batch, 1, blocks of the whole batch). A shape is what one
graph is made for, in the units of its family's axes.

    requests ──demands──► Demand(family, shape, steps, real) ──find──► Pick(shape of the graph, miss)

Bucket rules restate those of one version of the server, which `source` names. They import nothing of the server.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from llmc.buckets.limits import Limits
    from llmc.buckets.plan import Plan
    from llmc.buckets.traffic.events import TrafficRequest
    from llmc.buckets.traffic.step_time import StepTime
    from llmc.integrations.settings import Setting, Value


@dataclass(frozen=True)
class ServerDeployment:
    """How a vLLM server is deployed: the `device` that it runs on, as llmc names it ("": one of several), and the
    variables that put its compile cache below /cache, which are those that `llmc cache unpack` reads."""

    device: str
    cache: Mapping[str, str]


@dataclass(frozen=True)
class Integration:
    """What llmc knows of one system, each part of it optional. A part in code is named as "module:attribute", a class
    that takes no arguments; the module is imported on first use.

    buckets      `BucketRules`, under the integration's own name
    caches       name to a compile cache (artifacts/third_party/base.py)
    logs         name to a format of its logs or metrics (buckets/traffic/formats/base.py)
    histograms   what its metrics call the histograms of a request's tokens
    deployment   for vLLM and its plug-ins
    """

    buckets: str = ""
    caches: Mapping[str, str] = field(default_factory=dict)
    logs: Mapping[str, str] = field(default_factory=dict)
    histograms: Mapping[str, Literal["prompt", "output"]] = field(default_factory=dict)
    deployment: ServerDeployment | None = None


Shape = tuple[int, ...]
"""The numbers of one graph, one for each axis of its family."""

LIMITS = {
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
}
"""vLLM's flags of llmc's limits."""

Lists = Mapping[str, tuple[Shape, ...]]
"""The graphs that a server prepares: family to shapes, ascending and distinct; every family of the server is there."""

Miss = Literal["compile", "eager", "error"]
"""What a server does with a step that no graph covers: it compiles one in traffic, runs without one, or fails."""


@dataclass(frozen=True)
class GraphFamily:
    """One list of graphs. `axes` name the numbers of a shape; `unit` is what its work is counted in, in the plural.

    `counted` says whether its padding is judged where one figure is: not where its unit says little of a step's time.
    """

    name: str
    axes: tuple[str, ...]
    unit: str
    counted: bool = True


@dataclass(frozen=True)
class Setup:
    """What a server's rules depend on: its limits, and its own settings by name, with nothing left out."""

    limits: Limits
    own: Mapping[str, Value] = field(default_factory=dict)

    def number(self, name: str) -> int:
        """A setting that is a whole number."""
        value = self.own[name]
        if not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}, no number")
        return value


class Demand(NamedTuple):
    """`steps` runs of a graph that has to cover `shape`; together they have `real` units of work."""

    family: str
    shape: Shape
    steps: int
    real: int


Demands = Mapping[str, Mapping[Shape, Demand]]
"""Family to shape to all steps of that shape, in the order in which the shapes first came."""


class Pick(NamedTuple):
    """The graph that the server takes for a step; `miss` says what it does where no prepared graph covers the step.

    A server that bounds what it adds may take a `shape` that is smaller than the step in a number: then the step runs
    in its own number there.
    """

    shape: Shape
    miss: Miss | None = None


class Finder(Protocol):
    """The look-up of one family; it may remember what earlier look-ups added."""

    def find(self, shape: Shape) -> Pick:
        """The graph that a step of `shape` takes."""
        ...


class Dropped(NamedTuple):
    """A shape of a list from outside that the server leaves out or changes, and why, in words."""

    family: str
    shape: Shape
    reason: str


class Accepted(NamedTuple):
    """What a server makes of lists from outside: what it prepares, what it drops, and what it adds by itself."""

    lists: Lists
    dropped: tuple[Dropped, ...] = ()
    added: tuple[tuple[str, Shape], ...] = ()

    @classmethod
    def of(cls, given: Lists, lists: Lists, dropped: Iterable[Dropped] = ()) -> Accepted:
        """`lists` made of those that were `given`; what is not among these was added."""
        added = ((family, shape) for family, shapes in lists.items() for shape in shapes if shape not in given[family])
        return cls(lists, tuple(dropped), tuple(added))


@dataclass(frozen=True)
class GraphCost:
    """What a graph of a server costs at start, as published: seconds of warm-up and bytes of device memory.

    None where nothing was published. `source` says where the figures are from, and for which model and device.
    """

    seconds: float | None
    size: int | None
    source: str


@dataclass(frozen=True)
class Export:
    """Lists in a server's own form: variables, flags with their values, and files by name, each whole."""

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)


class NextAbove:
    """Takes the least number at or above the one asked for; above the largest, a step runs in its own shape."""

    def __init__(self, shapes: Sequence[Shape], miss: Miss) -> None:
        self._values = [value for (value,) in shapes]
        self._miss: Miss = miss

    def find(self, shape: Shape) -> Pick:
        """The graph that a step of `shape` takes."""
        index = bisect_left(self._values, shape[0])
        return Pick((self._values[index],)) if index < len(self._values) else Pick(shape, self._miss)


class BucketRules(ABC):
    """One server's planner, restated. A class takes no arguments; `Setup` carries what a rule depends on.

    name, title   as --server spells it, and as people call it: "vLLM on Intel Gaudi"
    source        where the rules were read: project, version or commit, and files
    settings      the server's own, beside the limits, that its rules depend on
    limit_flags   the server's own flag of each of llmc's limits that it has one for
    miss          what the server does with a step above the largest graph
    logged        settings that the server's log states, each with a pattern whose first group is the value
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    families: ClassVar[tuple[GraphFamily, ...]]
    settings: ClassVar[tuple[Setting, ...]]
    limit_flags: ClassVar[Mapping[str, str]] = LIMITS
    cost: ClassVar[GraphCost] = GraphCost(None, None, "nothing was published of a graph's seconds and memory")
    miss: ClassVar[Miss] = "error"
    logged: ClassVar[Mapping[str, re.Pattern[str]]] = {}

    @abstractmethod
    def limits(self, given: Mapping[str, int]) -> Limits:
        """The limits that the server runs with where only some of them, by name, are given.

        Raises InputError for limits that the server refuses at start.
        """

    @abstractmethod
    def default(self, setup: Setup) -> Lists:
        """The graphs that the server prepares when nobody gives it a list."""

    @abstractmethod
    def accept(self, setup: Setup, lists: Lists) -> Accepted:
        """What the server makes of lists from outside, by its own filters.

        Raises InputError where the server ends at start: no graph of a family left, or a list that it refuses.
        """

    @abstractmethod
    def demands(self, setup: Setup, requests: Iterable[TrafficRequest], step_time: StepTime) -> Iterator[Demand]:
        """The steps that the server takes for `requests`, which keep to the limits and come in order of arrival."""

    def finder(self, setup: Setup, family: str, shapes: Sequence[Shape]) -> Finder:
        """The look-up among prepared `shapes`, as `Lists` has them."""
        return NextAbove(shapes, self.miss)

    def work(self, setup: Setup, family: str, shape: Shape) -> int:
        """Units of work of one run of the graph `shape`, padding included."""
        return shape[0]

    def graphs(self, setup: Setup, lists: Lists) -> int:
        """How many graphs the server compiles or captures at start for `lists`."""
        return sum(map(len, lists.values()))

    @abstractmethod
    def propose(self, setup: Setup, demands: Demands, most: Mapping[str, int]) -> Lists:
        """The lists of least padding for `demands` under the server's own look-up, at most `most` shapes a family.

        They cover every step that the limits admit, so far as the server's list has to. Raises InputError where
        `most` shapes cannot do that.
        """

    @abstractmethod
    def from_plan(self, setup: Setup, plan: Plan) -> Lists:
        """The graphs of llmc's plan, whose contexts are tokens of each sequence, as this server counts them."""

    @abstractmethod
    def export(self, setup: Setup, lists: Lists) -> Export:
        """`lists` and the settings they hold for, complete enough to start the server with."""

    @abstractmethod
    def read(self, given: Export, setup: Setup) -> Lists:
        """The lists that variables, flags and files of the server state; its own defaults for families not stated.

        Raises InputError, naming file and line or flag, for what the server would skip, and for what it refuses.
        """

    @abstractmethod
    def read_log(self, lines: Iterable[str]) -> Lists | None:
        """The lists that the server printed when it started, or None where the log has none."""


def collect(demands: Iterable[Demand]) -> dict[str, dict[Shape, Demand]]:
    """`demands` with those of one shape added up; memory grows with distinct shapes, not with steps."""
    steps: dict[str, dict[Shape, list[int]]] = {}
    for family, shape, count, real in demands:
        known = steps.setdefault(family, {}).setdefault(shape, [0, 0])
        known[0] += count
        known[1] += real
    return {
        family: {shape: Demand(family, shape, count, real) for shape, (count, real) in shapes.items()}
        for family, shapes in steps.items()
    }
