"""Portable programs: one bucket's graph as a torch.export archive (.pt2), read without running anything in it.

    archive/models/model.json                          the graph in torch's own schema; the only record llmc uses
    archive/data/{weights,constants}/model_*.json      {"config": {}}: an archive carries no tensor
    archive/data/sample_inputs/model.pt                empty
    archive/{archive_format,archive_version,byteorder,.data/version}

Graph inputs: token_ids, past_lengths, new_lengths, the cache, then each weight by name. Outputs: logits, the top logits
if the bundle has them, then each layer's new keys and values (shapes: compiler/frontend/trace.py).

Security. Other tools can read the archive with `torch.export.load`. On torch 2.13 that function unpickles tensors,
custom objects and sample inputs with `weights_only=False` (sample inputs after a first try with True), evaluates
symbolic expressions as Python, and runs `guards_code`. llmc therefore parses the JSON itself. It accepts known records,
no tensors, no pickles, no symbols, and only ATen operators that are deterministic and mutate no inputs, applied to
tensors and numbers. The only string arguments are the two that name a form of GELU, so no operator reaches a file.
Anything else raises ValueError.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

ProgramFields: TypeAlias = dict[str, Any]
Resolve: TypeAlias = Callable[[str], Any]

ROOT = "archive/"
MODEL = "models/model.json"
SAMPLES = "data/sample_inputs/model.pt"
CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
RECORDS = frozenset({
    MODEL, SAMPLES, *CONFIGS, "archive_format", "archive_version", "byteorder", ".data/version",
})  # fmt: skip
SCHEMA_MAJOR = 8
"""Major version of torch's model.json schema, which changes when old readers would misread it."""

MAX_RECORD_BYTES = 256 << 20
FIXED_INPUTS = ("token_ids", "past_lengths", "new_lengths")
DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64", 12: "bool",
    13: "bfloat16",
}  # fmt: skip
"""torch's dtype numbers in model.json."""

_STRIDED = 7
_MEMORY_FORMATS = {1: "contiguous_format", 4: "preserve_format"}
_OPERATOR = re.compile(r"torch\.ops\.aten\.([A-Za-z_][A-Za-z0-9_]*)\.([A-Za-z_][A-Za-z0-9_]*)")
INFINITE: Mapping[object, float] = {"Infinity": math.inf, "-Infinity": -math.inf}
"""dtype names in programs: torch 2.13, _export/serde/serialize.py."""
_PLAIN: Mapping[str, tuple[type, ...]] = {"as_int": (int,), "as_float": (float, int), "as_bool": (bool,)}
_LISTS = ("as_tensors", "as_optional_tensors", "as_sym_ints")
_KEYWORD = 2
_GELU_FORMS = ("none", "tanh")


def read_archive(data: bytes) -> ProgramFields:
    """The graph of an archive, unchanged from model.json. Raises ValueError for anything but the records above."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = {i.filename.removeprefix(ROOT): _record(archive, i) for i in archive.infolist()}
        program = json.loads(records[MODEL])
        if set(records) != RECORDS:
            raise ValueError(f"unexpected or missing records {sorted(set(records) ^ RECORDS)[:3]}")
        if records[SAMPLES] or any(json.loads(records[name]) != {"config": {}} for name in CONFIGS):
            raise ValueError("it carries tensors or pickled objects")
        if program["schema_version"]["major"] != SCHEMA_MAJOR:
            raise ValueError(f"its schema is {program['schema_version']}, not {SCHEMA_MAJOR}")
        if program["range_constraints"] or program["guards_code"]:
            raise ValueError("it is not a program of one shape")
    except (zipfile.BadZipFile, zlib.error, KeyError, TypeError, EOFError, NotImplementedError, RuntimeError) as e:
        raise ValueError(f"not a portable program ({type(e).__name__}: {e})") from e
    if not isinstance(program, dict):
        raise ValueError("not a portable program (its graph is not an object)")
    return program


def _record(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.file_size > MAX_RECORD_BYTES:
        raise ValueError(f"record {info.filename!r:.80} has {info.file_size} bytes")
    return archive.read(info)


def write_archive(program: ProgramFields) -> bytes:
    """Create an archive of a graph. Equal graphs give equal bytes."""
    config = b'{"config": {}}'
    model = json.dumps(program, sort_keys=True, separators=(",", ":")).encode()
    records = {
        "archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little", ".data/version": b"6\n",
        CONFIGS[0]: config, CONFIGS[1]: config, MODEL: model, SAMPLES: b"",
    }  # fmt: skip
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in records.items():
            info = zipfile.ZipInfo(ROOT + name)
            info.compress_type = zipfile.ZIP_DEFLATED if name == MODEL else zipfile.ZIP_STORED
            info.create_system = 3
            archive.writestr(info, content)
    return out.getvalue()


def weight_names(program: ProgramFields) -> list[str]:
    """Weight names in the order of the graph's inputs. Raises ValueError."""
    try:
        calls = program["graph_module"]["module_call_graph"]
        _, spec = json.loads(calls[0]["signature"]["in_spec"])
        names = json.loads(spec["children_spec"][0]["children_spec"][-1]["context"])
    except (KeyError, IndexError, TypeError) as e:
        raise ValueError(f"the inputs of the program are not those of a step ({type(e).__name__}: {e})") from e
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ValueError("the weights of the program have no names")
    return names


def operator(target: object) -> Any:
    """The ATen operator `torch.ops.aten.NAME.OVERLOAD`; raises ValueError for an operator that programs may not use."""
    import torch

    match = _OPERATOR.fullmatch(target) if isinstance(target, str) else None
    found = getattr(getattr(torch.ops.aten, match[1], None), match[2], None) if match else None
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"{target!r:.80} is not an ATen operator")
    if found._schema.is_mutable:
        raise ValueError(f"{target} changes its inputs")
    if torch.Tag.nondeterministic_seeded in found.tags:
        raise ValueError(f"{target} is random")
    return found


def arguments(
    node: Mapping[str, Any], schema: Any, resolve: Resolve, device: Any = "cpu"
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a node: positional, keyword. `resolve(name)` gives values; tensors go to torch's `device`.

    Raises ValueError or KeyError.
    """
    known = [a.name for a in schema.arguments]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for given in node["inputs"]:
        name, value = given["name"], argument(given["arg"], resolve, device)
        if name not in known or name in kwargs:
            raise ValueError(f"{node['target']} takes no argument {name!r:.80}")
        if given.get("kind") == _KEYWORD:
            kwargs[name] = value
        elif len(args) < len(known) and name == known[len(args)]:
            args.append(value)
        else:
            raise ValueError(f"argument {name!r} of {node['target']} is out of place")
    return args, kwargs


def argument(tagged: Mapping[str, Any], resolve: Resolve, device: Any = "cpu") -> Any:
    """The value of one argument, {"as_KIND": …}. The traced device, cpu, becomes `device`.

    Raises ValueError for a kind that programs may not use.
    """
    import torch

    ((kind, value),) = tagged.items()
    if (types := _PLAIN.get(kind)) and type(value) in types:
        return value
    if kind == "as_float" and isinstance(value, str) and value in INFINITE:
        return INFINITE[value]
    if (types := _PLAIN.get(kind.removesuffix("s"))) and isinstance(value, list) and {*map(type, value)} <= {*types}:
        return value
    if kind == "as_string" and value in _GELU_FORMS:
        return value
    if kind == "as_none":
        return None
    if kind == "as_tensor":
        return resolve(value["name"])
    if kind in _LISTS:
        return [_named(v, resolve) for v in value]
    if kind == "as_scalar_type" and value in DTYPES:
        return getattr(torch, DTYPES[value])
    if kind == "as_device" and value["type"] == "cpu":
        return torch.device(device)
    if kind == "as_layout" and value == _STRIDED:
        return torch.strided
    if kind == "as_memory_format" and value in _MEMORY_FORMATS:
        return getattr(torch, _MEMORY_FORMATS[value])
    raise ValueError(f"an argument is {kind} {value!r:.80}")


def _named(value: Mapping[str, Any], resolve: Resolve) -> Any:
    """Resolve a tensor {"name": …}, an optional one {"as_tensor": …} or {"as_none": …}, or a number {"as_int": …}."""
    if "name" in value:
        return resolve(value["name"])
    ((kind, inner),) = value.items()
    if kind == "as_none":
        return None
    return inner if kind == "as_int" and type(inner) is int else resolve(inner["name"])


def output_names(node: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Names of the tensors that a node returns, and whether its operator returns a list or tuple."""
    outputs: Sequence[Mapping[str, Any]] = node["outputs"]
    if len(outputs) == 1 and "as_tensors" in outputs[0]:
        return [t["name"] for t in outputs[0]["as_tensors"]], True
    return [o["as_tensor"]["name"] for o in outputs], len(outputs) != 1


@dataclass(frozen=True)
class PortableProgram:
    """An opened program. `run` takes all inputs in order and returns all `outputs`; `sizes` are token_ids' [B, Q].

    `operators` counts operators that compute; views are not counted.
    """

    run: Callable[..., tuple[Any, ...]]
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    sizes: tuple[int, int]
    outputs: int
    operators: int

    @property
    def cache_inputs(self) -> int:
        """Number of cache tensors among the inputs; 0 if the bucket has no context."""
        return len(self.inputs) - len(FIXED_INPUTS) - len(self.weights)

    @classmethod
    def parse(cls, data: bytes, device: Any = "cpu") -> PortableProgram:
        """Open an archive to run on torch's `device`; raises ValueError for an invalid program."""
        return cls.of(read_archive(data), device)

    @classmethod
    def of(cls, program: ProgramFields, device: Any = "cpu") -> PortableProgram:
        """Open a graph to run on torch's `device`; raises ValueError for an invalid program."""
        try:
            return cls._build(program, device)
        except (KeyError, TypeError, IndexError, AttributeError, RuntimeError, OverflowError) as e:
            raise ValueError(f"a malformed program ({type(e).__name__}: {e})") from e

    @classmethod
    def _build(cls, program: ProgramFields, device: Any) -> PortableProgram:
        import operator as builtin

        from torch import fx

        source = program["graph_module"]["graph"]
        weights = tuple(weight_names(program))
        inputs = tuple(i["as_tensor"]["name"] for i in source["inputs"])
        if inputs[: len(FIXED_INPUTS)] != FIXED_INPUTS or len(inputs) < len(FIXED_INPUTS) + len(weights):
            raise ValueError(f"the program takes {inputs[:4]} …, not the inputs of a step")
        graph = fx.Graph()
        built: dict[str, fx.Node] = {}
        operators = 0
        for i, name in enumerate(inputs):
            built[name] = graph.placeholder(f"input_{i}")
        for node in source["nodes"]:
            target = operator(node["target"])
            operators += not target.is_view
            args, kwargs = arguments(node, target._schema, built.__getitem__, device)
            call = graph.call_function(target, tuple(args), kwargs)
            names, several = output_names(node)
            for i, name in enumerate(names):
                if name in built:
                    raise ValueError(f"{name!r:.80} is defined twice")
                built[name] = graph.call_function(builtin.getitem, (call, i)) if several else call
        graph.output(tuple(built[o["as_tensor"]["name"]] for o in source["outputs"]))
        batch, query = (size["as_int"] for size in source["tensor_values"]["token_ids"]["sizes"])
        # only the function, which uses no attribute of its module: a tenth of the graph's memory
        forward = type(fx.GraphModule({}, graph)).forward
        outputs = len(source["outputs"])
        return cls(partial(forward, None), inputs, weights, (batch, query), outputs, operators)
