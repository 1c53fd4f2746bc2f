"""Shows an XLA executable: its portable program as StableHLO text, or as an HLO proto for another compiler.

The program shown is that of the executable's own platform: a stored blob of jax.export is for several platforms at
once, with the platform as a first argument and a choice by it wherever they differ. Arguments and results are those of
the executable's header (runtime/executors/xla/envelope.py). A sharded graph is shown whole, with its shardings.

The HLO proto is `xla.HloModuleProto`, which XLA's own tools and neuronx-cc (`--framework=XLA`) read. Operations that
only newer compilers support (the largest k) are written out in plain ones, and instructions have small numbers
(hlo_ids.py).

Security. `jax.export.deserialize` reads a flatbuffer and MLIR bytecode, and runs nothing of either. Trees of arguments
and results (`in_tree`, `out_tree`) are flatbuffers as well: tuples, lists, dicts and leaves; any other node is a name
and bytes for a function that someone registered with JAX in this process, else an error. Ours are flat tuples, and llmc
registers none. Neither pickle nor eval is reached: tests/runtime/executors/xla/test_no_pickle.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmc.compiler.targets.xla.hlo_ids import renumbered
from llmc.errors import ArtifactError, DeviceError, InputError
from llmc.platforms import how_to_install
from llmc.runtime.executors.envelope import ExecutableFile
from llmc.runtime.executors.xla.envelope import FORM, StepHeader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store

LISTED = 5
EXPORT = "export"

_PLATFORM_ARGUMENT = "_platform_index"
_CLEAN = "builtin.module(sccp,canonicalize,symbol-dce)"
_PLAIN = "builtin.module(func.func(stablehlo-legalize-composite-to-call),sccp,canonicalize,symbol-dce)"


def of_entry(store: Store, entry: Entry, executable: str | None = None) -> ExecutableFile:
    """Return the executable of `entry`, or its output named `executable`. Raises InputError if it has none of XLA's."""
    names = [name for name in entry.outputs if executable is None or name == executable]
    location = f"{entry.key.kind} {entry.key.short}"
    if len(names) != 1:
        raise InputError(f"{location} has {_some(entry.outputs)}; choose one with --executable")
    data = store.get_bytes(entry.outputs[names[0]].digest)
    return _envelope(data, location, str(entry.key.components.get("target", "no target")))


def of_bundle(files: BundleFiles, executable: str | None = None) -> ExecutableFile:
    """Return the executable that `executable` describes by words of `cache show`, or another program by file name.

    Raises InputError when there is none, or more than one, or it is not XLA's.
    """
    manifest, words = files.manifest, (executable or "").split()
    found = {str(item): item.blob for item in manifest.executables if set(words) <= set(str(item).split())}
    for exact in (found, manifest.files):
        if executable is not None and executable in exact:
            found = {executable: exact[executable]}
    if not found:
        known = [str(item) for item in manifest.executables]
        raise InputError(f"{files.folder} has no executable {executable!r:.200}; it has {_some(known)}")
    if len(found) > 1:
        raise InputError(f"{files.folder} has {_some(found)}; choose one with --executable")
    ((name, digest),) = found.items()
    return _envelope(files.read(digest), f"{files.folder}: {name}", manifest.target)


def stablehlo_text(envelope: ExecutableFile) -> str:
    """Return the program as StableHLO. Raises DeviceError without JAX, ArtifactError if this JAX cannot read it."""
    mlir = _jax_mlir()
    with mlir.make_ir_context():
        return str(_module(envelope, _CLEAN))


def hlo_proto(envelope: ExecutableFile) -> bytes:
    """Return the program as a serialised `xla.HloModuleProto`; raises the errors of `stablehlo_text`."""
    mlir = _jax_mlir()
    from jaxlib import _jax

    with mlir.make_ir_context():
        code = mlir.module_to_bytecode(_module(envelope, _PLAIN))
    built = _jax.mlir.mlir_module_to_xla_computation(code, use_tuple_args=False, return_tuple=False)
    return renumbered(built.as_serialized_hlo_module_proto())


def _envelope(data: bytes, source: str, target: str) -> ExecutableFile:
    if not data.startswith(FORM.magic[:-1]):
        raise InputError(
            f"{source} is not an XLA executable ({target}); --stablehlo and --hlo show those of devices xla and tpu"
        )
    return ExecutableFile.parse(data, source, FORM)


def _some(names: Iterable[str]) -> str:
    known = [repr(name) for name in names]
    more = f" and {len(known) - LISTED} more" if len(known) > LISTED else ""
    return (", ".join(known[:LISTED]) or "none") + more


def _jax_mlir() -> Any:
    try:
        import jax  # noqa: F401 - only whether it is there
    except ImportError:
        raise DeviceError(f"jax is not installed; {how_to_install('jax', 'xla')}") from None
    from jax._src.interpreters import mlir

    return mlir


def _module(envelope: ExecutableFile, passes: str) -> Any:
    """The program for the executable's platform as an MLIR module, after `passes`; within an MLIR context."""
    import jax
    from jax import export
    from jaxlib.mlir.dialects import stablehlo
    from jaxlib.mlir.passmanager import PassManager

    platform = StepHeader.parse(envelope.header, envelope.source).platform
    blob = bytearray(envelope.section(EXPORT))
    try:
        program = export.deserialize(blob)
        module = program.mlir_module(serialized=False)
        if len(program.platforms) > 1:
            _fix_platform(module, program.platforms.index(platform))
    except Exception as e:
        raise ArtifactError(
            f"{envelope.source}: this jax ({jax.__version__}) cannot read the portable program, made by jax "
            f"{envelope.header['jax']} ({type(e).__name__}: {e}); compile it again with `llmc compile`"
        ) from e
    stablehlo.register_stablehlo_passes()
    PassManager.parse(passes).run(module.operation)
    return module


def _fix_platform(module: Any, index: int) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    (main,) = (
        item
        for item in module.body.operations
        if "sym_name" in item.attributes and item.attributes["sym_name"].value == "main"
    )
    block, attributes = main.regions[0].blocks[0], list(main.attributes["arg_attrs"])
    if "jax.global_constant" not in attributes[0] or attributes[0]["jax.global_constant"].value != _PLATFORM_ARGUMENT:
        raise ValueError("its first argument is not the platform")
    with ir.Location.unknown(), ir.InsertionPoint.at_block_begin(block):
        constant = stablehlo.ConstantOp(ir.Attribute.parse(f"dense<{index}> : tensor<i32>"))
    block.arguments[0].replace_all_uses_with(constant.result)
    block.erase_argument(0)
    function = main.attributes["function_type"].value
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(function.inputs[1:], function.results))
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes[1:])
