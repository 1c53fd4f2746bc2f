"""--lowering torch-xla: torch-xla writes a bucket's StableHLO in a separate environment, and JAX calls it.

torch-xla pins another torch than llmc, so the program goes there as a file and StableHLO comes back
(torch_xla_worker.py). `TorchXlaCore` uses that module in the step in place of operators.py; cache, donation,
compilation and verification are those of every other core (step.py). torch has 64-bit integers, JAX 32-bit ones: they
are converted where the module is called.

Later versions read StableHLO's portable artifacts for five years (its compatibility guarantee), so the two environments
need not share a version.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func, stablehlo
from jax.interpreters import mlir

from llmc.artifacts.temporaries import temporary_folder
from llmc.compiler.targets.xla import torch_xla_worker as worker
from llmc.compiler.targets.xla.operators import narrowed
from llmc.compiler.targets.xla.step import Array, CoreOutput, Given, Read, in_turn, stacked
from llmc.errors import CompileError, DeviceError
from llmc.paths import expanded
from llmc.runtime import portable_program
from llmc.runtime.portable_program import DTYPES, FIXED_INPUTS, ProgramFields, weight_names, write_archive

ENVIRONMENT = Path(".venv-torch-xla")
"""Location of the environment from `make torch-xla-env`, in the working directory."""

LIMIT_SECONDS = 1800
"""After this time a worker counts as hung; a graph of 30 layers takes some seconds."""

_INSTALL = "create one with `make torch-xla-env`, or name its Python in LLMC_TORCH_XLA_PYTHON"
_ELEMENTS = {
    "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64", "bool": "i1", "uint8": "ui8",
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
}  # fmt: skip
"""MLIR's dtype names by torch's."""


def find_python(setting: str | None) -> Path:
    """Find the Python of torch-xla's environment: `setting`, else that of `ENVIRONMENT`. Raises DeviceError."""
    python = expanded(setting) if setting else ENVIRONMENT / "bin" / "python"
    if not python.is_file():
        raise DeviceError(
            f"--lowering torch-xla needs an environment with torch-xla; no Python at {python}: {_INSTALL}"
        )
    return python.absolute()


def versions(python: Path) -> dict[str, str]:
    """Return the versions of torch and torch-xla in the environment of `python`, for keys. Raises DeviceError."""
    code = "from importlib.metadata import version as v; print(v('torch'), v('torch-xla'))"
    done = _run(python, ["-I", "-c", code], Path.cwd())
    if done.returncode:
        raise DeviceError(f"{python} has no torch-xla ({_last_line(done.stderr)}): {_INSTALL}")
    torch, torch_xla = done.stdout.split()
    return {"torch-xla.torch": torch, "torch-xla": torch_xla}


@dataclass(frozen=True)
class StableHlo:
    """The worker's output: a portable artifact, and the program input for each argument of its main."""

    module: bytes
    arguments: tuple[int, ...]


def export(archive: bytes, python: Path) -> StableHlo:
    """Convert a portable program to StableHLO with `python`: some 10 seconds, most of them torch-xla's import.

    Raises DeviceError where torch-xla cannot be imported, CompileError with the worker's last line for other failures.
    """
    with temporary_folder("torch-xla") as folder:
        program = folder / "program.pt2"
        program.write_bytes(archive)
        files = [worker.__file__, portable_program.__file__, str(program), str(folder)]
        done = _run(python, ["-I", *files], folder)
        if done.returncode == worker.NO_TORCH_XLA:
            raise DeviceError(f"{python} has no usable torch-xla ({_last_line(done.stderr)}): {_INSTALL}")
        if done.returncode < 0:
            raise CompileError(f"torch-xla was ended by signal {-done.returncode}{_location(folder)}")
        if done.returncode:
            raise CompileError(f"torch-xla cannot export the program: {_last_line(done.stderr)}")
        try:
            arguments = tuple(int(i) for i in json.loads((folder / worker.FACTS).read_text())["arguments"])
            return StableHlo((folder / worker.MODULE).read_bytes(), arguments)
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise CompileError(f"torch-xla's worker left no module ({type(e).__name__}: {e})") from e


def _run(python: Path, arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(python), *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=LIMIT_SECONDS, cwd=folder
        )
    except subprocess.TimeoutExpired:
        raise CompileError(f"torch-xla did not finish within {LIMIT_SECONDS} seconds") from None
    except OSError as e:
        raise DeviceError(f"{python} cannot be run ({e.strerror}): {_INSTALL}") from e


def _location(folder: Path) -> str:
    location = folder / worker.OPERATOR
    return f" in {location.read_text()}, which it may not be able to lower" if location.exists() else ""


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")


def torch_xla_core(program: bytes, batch: int, query: int, context: int, python: Path) -> TorchXlaCore:
    """Return the core of one bucket of a traced program (model.json). Raises the errors of `export`."""
    from llmc.compiler.program.to_export import specialise

    special = specialise(json.loads(program), batch, query, context)
    return TorchXlaCore(special, export(write_archive(special), python))


class TorchXlaCore:
    """A step.Core by torch-xla's module. Raises CompileError where its arguments and results are not the program's."""

    def __init__(self, program: ProgramFields, built: StableHlo) -> None:
        graph = program["graph_module"]["graph"]
        inputs = [given["as_tensor"]["name"] for given in graph["inputs"]]
        outputs = [given["as_tensor"]["name"] for given in graph["outputs"]]
        self.weights: Sequence[str] = weight_names(program)
        self._inputs = inputs
        self._arguments = built.arguments
        self._cache = len(inputs) - len(FIXED_INPUTS) - len(self.weights)
        self._top = len(outputs) % 2 == 1 and graph["tensor_values"][outputs[2]]["dtype"] == _INT64
        if any(not 0 <= i < len(inputs) for i in built.arguments):
            raise CompileError(f"torch-xla's module takes inputs that the program does not have: it has {len(inputs)}")
        metas: Mapping[str, Any] = graph["tensor_values"]
        self._expected = [_narrowed(metas[name]) for name in inputs]
        taken = [(inputs[i], metas[inputs[i]]) for i in built.arguments]
        self._module = _Module(built.module, taken, [(name, metas[name]) for name in outputs])

    def run(self, given: Given, read: Read, weights: Sequence[Array]) -> CoreOutput:
        cache = [read(*at) for at in in_turn(self._cache)]
        arrays = [*(given[name] for name in FIXED_INPUTS), *cache, *weights]
        for name, expected, found in zip(self._inputs, self._expected, arrays, strict=True):
            if (expected.shape, expected.dtype) != (found.shape, found.dtype):
                took = f"{found.dtype}{list(found.shape)}"
                raise CompileError(f"torch-xla's module takes {name} as {expected.str_short()}, not {took}")
        logits, *rest = _CALL.bind(*(arrays[i] for i in self._arguments), module=self._module)
        top, new = (rest[:2], rest[2:]) if self._top else ([], rest)
        return CoreOutput(logits, tuple(top), stacked(new, in_turn(len(new))))


_INT64 = next(code for code, name in DTYPES.items() if name == "int64")
_Named = Sequence[tuple[str, Mapping[str, Any]]]
"""Tensor names with their descriptions in model.json."""


class _Module:
    """A StableHLO module for JAX: the types of its results, with 64-bit numbers narrowed."""

    def __init__(self, data: bytes, arguments: _Named, results: _Named) -> None:
        self.data = data
        self.results = tuple(_narrowed(meta) for _, meta in results)
        with mlir.make_ir_context():
            main = self.main(self.load())
            found = ([str(t) for t in main.type.inputs], [str(t) for t in main.type.results])
        for kind, types, tensors in (("argument", found[0], arguments), ("result", found[1], results)):
            expected = [_mlir_type(meta) for _, meta in tensors]
            if types != expected:
                at = next((i for i, (a, b) in enumerate(zip(types, expected, strict=False)) if a != b), -1)
                what = f"{tensors[at][0]} is {types[at]}, not {expected[at]}" if at >= 0 else f"{len(types)} of them"
                raise CompileError(f"torch-xla's module does not have the program's {len(expected)} {kind}s: {what}")

    def load(self) -> ir.Module:
        """Raises CompileError for bytes that are no artifact.

        Its sorts are made stable: torch-xla's are not, and of equal logits the lower id comes first.
        """
        try:
            module = stablehlo.deserialize_portable_artifact(ir.Context.current, self.data)
        except (ValueError, ir.MLIRError) as e:
            raise CompileError(f"torch-xla's module is no StableHLO that this version reads: {e}") from e
        for operation in self.main(module).entry_block.operations:
            if operation.operation.name == "stablehlo.sort":
                operation.operation.attributes["is_stable"] = ir.BoolAttr.get(True, module.context)
        return module

    @staticmethod
    def main(module: ir.Module) -> Any:
        return ir.SymbolTable(module.operation)["main"]


def _sizes(meta: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(size["as_int"] for size in meta["sizes"])


def _narrowed(meta: Mapping[str, Any]) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(_sizes(meta), narrowed(meta["dtype"]))


def _mlir_type(meta: Mapping[str, Any]) -> str:
    return f"tensor<{'x'.join([*map(str, _sizes(meta)), _ELEMENTS[DTYPES[meta['dtype']]]])}>"


def _abstract(*_: Any, module: _Module) -> tuple[jax.core.ShapedArray, ...]:
    return module.results


def _lower(context: Any, *given: Any, module: _Module) -> Sequence[Any]:
    """Move the module's functions into the step's, and call its main with integers of its width."""
    target = context.module_context.module
    with target.context:
        built = module.load()
    wide = module.main(built).type
    name = mlir.merge_mlir_modules(target, "torch_xla", built, dst_symtab=context.module_context.symbol_table)
    call = func.CallOp(
        wide.results,
        ir.FlatSymbolRefAttr.get(name),
        [_converted(value, kind) for value, kind in zip(given, wide.inputs, strict=True)],
    )
    narrow = [ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in module.results]
    return [_converted(value, kind) for value, kind in zip(call.results, narrow, strict=True)]


def _converted(value: Any, kind: Any) -> Any:
    return value if value.type == kind else stablehlo.convert(kind, value)


_CALL = Primitive("torch_xla")
_CALL.multiple_results = True
_CALL.def_abstract_eval(_abstract)
mlir.register_lowering(_CALL, _lower)
