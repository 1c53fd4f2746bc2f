"""Converts a portable program to StableHLO with torch-xla; runs only in torch-xla's own environment.

    python -I torch_xla_worker.py READER ARCHIVE FOLDER

READER is the file llmc/runtime/portable_program.py, the only part of llmc that is used here: it needs nothing but
torch. ARCHIVE is a program of one shape (.pt2). Written to FOLDER:

    module.stablehlo    a portable StableHLO artifact; function main, results in the program's order, integers 64-bit
    module.json         {"arguments": for each argument of main the position of the program's input,
                         "versions": {"torch": …, "torch_xla": …}}
    operator            the operator that is being traced and the last weight before it; removed at the end

Inputs are placeholders without storage (torch_xla.core.xla_builder), so that a model of any size needs no memory; an
input that nothing reads is no argument. A tensor that is no input is an error. So is an operator that torch-xla would
have PyTorch run on the host: where that reads a placeholder, torch-xla ends the process (signal 11). Float32 matmuls
request full precision, as in operators.py.

Exit 0 when both files are written; 3 where torch-xla cannot be imported; 1 for anything else. The last line on stderr
is the error.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "module.stablehlo"
FACTS = "module.json"
OPERATOR = "operator"
NO_TORCH_XLA = 3
_FALLBACK = "aten::"
"""Prefix in torch-xla's counters of operators that ran on the host."""


def main(arguments: Sequence[str]) -> None:
    """Export the program of the command line."""
    reader, archive, folder = (Path(argument) for argument in arguments)
    try:
        export(_load(reader), archive.read_bytes(), folder)
    except ImportError as e:
        _stop(NO_TORCH_XLA, e)
    except (ValueError, RuntimeError, NotImplementedError, OSError) as e:
        _stop(1, e)


def export(reader: ModuleType, archive: bytes, folder: Path) -> None:
    """Write module and facts of an archive.

    Raises ValueError for one that is no program, ImportError without torch-xla, RuntimeError or NotImplementedError
    otherwise.
    """
    program = reader.read_archive(archive)

    import torch_xla  # type: ignore[import-not-found, unused-ignore]
    from torch_xla.core import xla_model  # type: ignore[import-not-found, unused-ignore]
    from torch_xla.debug import metrics  # type: ignore[import-not-found, unused-ignore]

    inputs, outputs, versions = _trace(reader, program, folder / OPERATOR)
    module = xla_model.get_stablehlo_bytecode(outputs)
    hosted = [name.removeprefix(_FALLBACK) for name in metrics.counter_names() if name.startswith(_FALLBACK)]
    if hosted:
        raise RuntimeError(f"torch-xla has no lowering for {', '.join(sorted(hosted))}")
    offsets = {torch_xla._XLAC._xla_get_tensor_id(tensor): i for i, tensor in enumerate(inputs)}
    read, _ = torch_xla._XLAC._get_tensors_xla_device_data_node(outputs)
    if unknown := [i for i in read if i not in offsets]:
        raise RuntimeError(f"{len(unknown)} tensors of the module are no inputs of the program")
    facts = {"arguments": [offsets[i] for i in read], "versions": versions}
    (folder / MODULE).write_bytes(module)
    (folder / FACTS).write_text(json.dumps(facts, sort_keys=True))


def _trace(reader: ModuleType, program: Mapping[str, Any], index: Path) -> tuple[list[Any], list[Any], dict[str, str]]:
    import torch
    import torch_xla
    from torch_xla import backends, runtime
    from torch_xla.core import xla_builder

    runtime.set_device_type("CPU")
    backends.set_mat_mul_precision("highest")
    torch_xla._XLAC._set_xla_all_numbers_special_scalars(True)  # numbers become constants instead of arguments
    device = torch_xla.device()
    graph = program["graph_module"]["graph"]
    names = [given["as_tensor"]["name"] for given in graph["inputs"]]
    metas = [graph["tensor_values"][name] for name in names]
    inputs = [
        xla_builder.create_placeholder_tensor(
            [size["as_int"] for size in meta["sizes"]], getattr(torch, reader.DTYPES[meta["dtype"]])
        )
        for meta in metas
    ]
    weights = reader.weight_names(program)
    values = dict(zip(names, inputs, strict=True))
    labels = dict(zip(names[len(names) - len(weights) :], weights, strict=True))

    def moved(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    last = "the start"
    with torch.no_grad():
        for node in graph["nodes"]:
            last = next((labels[name] for name in _reads(node) if name in labels), last)
            index.write_text(f"{node['target']} (after {last})")
            try:
                _run(reader, node, values, moved)
            except (RuntimeError, NotImplementedError, ValueError) as e:
                raise RuntimeError(f"{index.read_text()}: {_first_line(e)}") from e
    index.unlink()
    outputs = [values[given["as_tensor"]["name"]] for given in graph["outputs"]]
    return inputs, outputs, {"torch": torch.__version__, "torch_xla": torch_xla.__version__}


def _run(reader: ModuleType, node: Mapping[str, Any], values: dict[str, Any], moved: Callable[[Any], Any]) -> None:
    operator = reader.operator(node["target"])
    args, kwargs = reader.arguments(node, operator._schema, values.__getitem__)
    result = operator(*map(moved, args), **{name: moved(value) for name, value in kwargs.items()})
    names, several = reader.output_names(node)
    values.update(zip(names, result if several else [result], strict=True))


def _reads(node: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that a node takes individually, not in a list; weights are never in one."""
    return [given["arg"]["as_tensor"]["name"] for given in node["inputs"] if "as_tensor" in given["arg"]]


def _load(file: Path) -> ModuleType:
    """A module by its file: on the path, its neighbours would shadow libraries of the same names."""
    spec = importlib.util.spec_from_file_location("portable_program", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _first_line(error: BaseException) -> str:
    """torch's message without the C++ stack frames that follow."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _stop(code: int, error: BaseException) -> None:
    print(_first_line(error), file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
