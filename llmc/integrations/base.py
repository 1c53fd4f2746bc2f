"""Interface of an integration: the location of its parts, and its bucket rules.

The interface of a compile cache is artifacts/third_party/base.py, that of a log format buckets/traffic/formats/base.py.

A server counts graphs in its own families. For example, vLLM on CUDA has one list, of tokens per step; vLLM on Gaudi
has prompt graphs of (batch, query, context blocks) and decode graphs of (batch, 1, blocks of the whole batch). A shape
is the size of one graph, in the units of its family's axes.

    requests ──demands──► Demand(family, shape, steps, real) ──find──► Pick(shape of the graph, miss)

Bucket rules restate those of one version of the server, named in `source`. They import nothing of the server.
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
    """Deployment of a vLLM server.

    `device` is llmc's name of its device ("": one of several). `variables` put its compile cache below /cache; `llmc
    cache unpack` reads the same variables.
    """

    device: str
    cache: Mapping[str, str]


@dataclass(frozen=True)
class Integration:
    """The parts of one system, each optional.

    A part in code is named as "module:attribute", a class that takes no arguments; the module is imported on first use.

    buckets     `BucketRules`, under the integration's own name
    caches      name to a compile cache (artifacts/third_party/base.py)
    logs        name to a format of its logs or metrics (buckets/traffic/formats/base.py)
    histograms  names of the histograms of a request's tokens in its metrics
    cached      names of counters of prompt tokens from its prefix cache; the first one in the metrics counts
    deployment  for vLLM and its plug-ins
    """

    buckets: str = ""
    caches: Mapping[str, str] = field(default_factory=dict)
    logs: Mapping[str, str] = field(default_factory=dict)
    histograms: Mapping[str, Literal["prompt", "output"]] = field(default_factory=dict)
    cached: tuple[str, ...] = ()
    deployment: ServerDeployment | None = None


Shape = tuple[int, ...]
"""The size of one graph, one number for each axis of its family."""

LIMITS = {
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
}
"""vLLM's flags of llmc's limits."""

Lists = Mapping[str, tuple[Shape, ...]]
"""The graphs that a server prepares: family to shapes, ascending and distinct, for every family of the server."""

Miss = Literal["compile", "eager", "error"]
"""A server's reaction to a step that no graph covers: compile one during serving, run without one, or fail."""


@dataclass(frozen=True)
class GraphFamily:
    """One list of graphs. `axes` name the numbers of a shape; `unit` is the unit of its work, in the plural.

    `counted` says whether its padding counts in a single total; it does not where the unit says little about a step's
    time.
    """

    name: str
    axes: tuple[str, ...]
    unit: str
    counted: bool = True


@dataclass(frozen=True)
class Setup:
    """The inputs of a server's rules: its limits, and all of its own settings by name."""

    limits: Limits
    own: Mapping[str, Value] = field(default_factory=dict)

    def number(self, name: str) -> int:
        """Return a setting that is a whole number."""
        value = self.own[name]
        if not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}, which is not a number")
        return value


class GraphDemand(NamedTuple):
    """`steps` runs of a graph that must cover `shape`; together they have `real` units of work."""

    family: str
    shape: Shape
    steps: int
    real: int


Demands = Mapping[str, Mapping[Shape, GraphDemand]]
"""Family → shape → all steps of that shape, in order of first occurrence."""


class Pick(NamedTuple):
    """The graph that the server selects for a step; `miss` is its reaction where no prepared graph covers the step.

    A server with bounds on added graphs may select a `shape` that is smaller than the step in a dimension. The step
    then runs with its own size there.
    """

    shape: Shape
    miss: Miss | None = None


class Finder(Protocol):
    """The look-up of one family; it may remember graphs that earlier look-ups added."""

    def find(self, shape: Shape) -> Pick:
        """Return the graph for a step of `shape`."""
        ...


class Dropped(NamedTuple):
    """A shape of a given list that the server drops or changes, and the reason as text."""

    family: str
    shape: Shape
    reason: str


class Accepted(NamedTuple):
    """A server's result for given lists: the shapes it prepares, drops, and adds."""

    lists: Lists
    dropped: tuple[Dropped, ...] = ()
    added: tuple[tuple[str, Shape], ...] = ()

    @classmethod
    def of(cls, given: Lists, lists: Lists, dropped: Iterable[Dropped] = ()) -> Accepted:
        """Create the result `lists` for `given` lists; shapes not in `given` were added."""
        added = ((family, shape) for family, shapes in lists.items() for shape in shapes if shape not in given[family])
        return cls(lists, tuple(dropped), tuple(added))


@dataclass(frozen=True)
class GraphCost:
    """Published start-up costs of a server's graph: seconds of warm-up and bytes of device memory.

    None where nothing was published. `source` names the source of the figures, with model and device.
    """

    seconds: float | None
    size: int | None
    source: str


@dataclass(frozen=True)
class Export:
    """Lists in a server's own form: variables, flags with their values, and complete files by name.

    Files other than .json may begin with comments: lines that begin with #. `notes` explain values that look wrong.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class NextAbove:
    """Selects the least number at or above the requested one; above the largest, a step runs in its own shape."""

    def __init__(self, shapes: Sequence[Shape], miss: Miss) -> None:
        self._values = [value for (value,) in shapes]
        self._miss: Miss = miss

    def find(self, shape: Shape) -> Pick:
        """Return the graph for a step of `shape`."""
        index = bisect_left(self._values, shape[0])
        return Pick((self._values[index],)) if index < len(self._values) else Pick(shape, self._miss)


class BucketRules(ABC):
    """Restated planner rules of one server. A class takes no arguments; `Setup` carries the inputs of the rules.

    name, title  the name for --server, and the full name: "vLLM on Intel Gaudi"
    source       the source of the rules: project, version or commit, and files
    settings     the server's own settings, in addition to the limits, that its rules depend on
    limit_flags  the server's flags for llmc's limits
    miss         the server's reaction to a step above the largest graph
    logged       settings in the server's log, each with a pattern whose first group is the value
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    families: ClassVar[tuple[GraphFamily, ...]]
    settings: ClassVar[tuple[Setting, ...]]
    limit_flags: ClassVar[Mapping[str, str]] = LIMITS
    cost: ClassVar[GraphCost] = GraphCost(None, None, "seconds and memory of a graph were not published")
    miss: ClassVar[Miss] = "error"
    logged: ClassVar[Mapping[str, re.Pattern[str]]] = {}

    @abstractmethod
    def limits(self, given: Mapping[str, int]) -> Limits:
        """Return the server's limits where only some of them, by name, are given.

        Raises InputError for limits that the server refuses at start.
        """

    @abstractmethod
    def default(self, setup: Setup) -> Lists:
        """Return the graphs that the server prepares without a given list."""

    @abstractmethod
    def accept(self, setup: Setup, lists: Lists) -> Accepted:
        """Apply the server's own filters to given lists.

        Raises InputError where the server would exit at start: a family without graphs, or a list that it refuses.
        """

    @abstractmethod
    def demands(self, setup: Setup, requests: Iterable[TrafficRequest], step_time: StepTime) -> Iterator[GraphDemand]:
        """Yield the steps that the server takes for `requests`, which are within the limits and in arrival order."""

    def uniform(self, setup: Setup, own: Lists) -> Iterator[GraphDemand]:
        """Yield steps of all sizes up to the largest of `own`, the server's own lists, each equally often.

        Of more than MOST_SIZES sizes, as many at equal distances.
        """
        for family in self.families:
            top = max((shape[0] for shape in own[family.name]), default=0)
            for size in spaced(top):
                shape = (size,)
                yield GraphDemand(family.name, shape, 1, self.work(setup, family.name, shape))

    def finder(self, setup: Setup, family: str, shapes: Sequence[Shape]) -> Finder:
        """Return the look-up among prepared `shapes`."""
        return NextAbove(shapes, self.miss)

    def work(self, setup: Setup, family: str, shape: Shape) -> int:
        """Return the units of work of one run of the graph `shape`, including padding."""
        return shape[0]

    def graphs(self, setup: Setup, lists: Lists) -> int:
        """Return the number of graphs that the server compiles or captures at start for `lists`."""
        return sum(map(len, lists.values()))

    @abstractmethod
    def propose(self, setup: Setup, demands: Demands, most: Mapping[str, int]) -> Lists:
        """Return the lists of least padding for `demands` under the server's own look-up, at most `most` shapes per
        family.

        They cover every step that the limits admit, as far as the server's list must. Raises InputError where `most`
        shapes cannot.
        """

    @abstractmethod
    def from_plan(self, setup: Setup, plan: Plan) -> Lists:
        """Convert llmc's plan, whose contexts are tokens of each sequence, to this server's graphs."""

    @abstractmethod
    def export(self, setup: Setup, lists: Lists) -> Export:
        """Export `lists` and the settings they hold for, complete enough to start the server."""

    @abstractmethod
    def read(self, given: Export, setup: Setup) -> Lists:
        """Return the lists in variables, flags and files of the server, with its own defaults for missing families.

        Raises InputError, naming file and line or flag, for contents that the server would skip or refuse.
        """

    @abstractmethod
    def read_log(self, lines: Iterable[str]) -> Lists | None:
        """Return the lists that the server printed at start, or None where the log has none."""


MOST_SIZES = 4096
"""Most sizes of uniform steps in one dimension."""


def spaced(top: int, most: int = MOST_SIZES) -> range:
    """Return at most `most` numbers from 1 to `top` at equal distances, `top` among them."""
    return range(top, 0, -max(1, -(-top // most)))


def collect(demands: Iterable[GraphDemand]) -> dict[str, dict[Shape, GraphDemand]]:
    """Sum `demands` by shape; memory grows with distinct shapes, not with steps."""
    steps: dict[str, dict[Shape, list[int]]] = {}
    for family, shape, count, real in demands:
        known = steps.setdefault(family, {}).setdefault(shape, [0, 0])
        known[0] += count
        known[1] += real
    return {
        family: {shape: GraphDemand(family, shape, count, real) for shape, (count, real) in shapes.items()}
        for family, shapes in steps.items()
    }
