"""What is read is never unpickled (P12): not by llmc's code, and not by what it calls of JAX and PJRT.

jax.experimental.serialize_executable, the way that JAX documents, is pickle. llmc keeps PJRT's own bytes and a
jax.export blob instead: a flatbuffer whose trees of arguments and results are lists of names, with StableHLO in it.
"""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import Any

import pytest

import llmc
from tests.tiers import full

FOLDER = Path(llmc.__file__).parent
UNSAFE = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib",
    "jax.experimental.serialize_executable",
}  # fmt: skip
"""Modules that run what they read."""

LOADERS = {"torch.load", "numpy.load", "np.load", "torch.export.load"}
"""Functions that unpickle unless told not to."""

PICKLE = ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler")


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return set()


def unpickles(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    function = ast.unparse(node.func)
    if function in {"np.load", "numpy.load"}:
        return given.get("allow_pickle", "False") != "False"
    return function in LOADERS and given.get("weights_only") != "True"


@full
def test_no_file_imports_what_unpickles() -> None:
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for name in imported(node):
                assert name not in UNSAFE and name.partition(".")[0] not in UNSAFE, f"{path}:{node.lineno}"  # type: ignore[attr-defined]
            assert not unpickles(node), f"{path}:{node.lineno}"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "line", [
        "import pickle", "from pickle import loads", "from jax.experimental import serialize_executable",
        "from jax.experimental.serialize_executable import deserialize_and_load", "import joblib.memory",
    ],
)  # fmt: skip
def test_the_search_would_find_an_import(line: str) -> None:
    names = imported(ast.parse(line).body[0])
    assert any(name in UNSAFE or name.partition(".")[0] in UNSAFE for name in names)


@pytest.mark.parametrize("line", ["torch.load(path)", "np.load(path, allow_pickle=True)", "torch.export.load(path)"])
def test_the_search_would_find_a_call(line: str) -> None:
    assert unpickles(ast.parse(line, mode="eval").body)


class UnpickledError(Exception):
    pass


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever unpickles anything, from Python or from C, fails."""
    import _pickle

    def refuse(*arguments: object, **named: object) -> Any:
        raise UnpickledError

    for name in PICKLE:
        monkeypatch.setattr(pickle, name, refuse)
        if hasattr(_pickle, name):
            monkeypatch.setattr(_pickle, name, refuse)


@pytest.fixture(scope="module")
def compiled() -> Any:
    import jax

    return jax.jit(lambda x: x * 2 + 1, donate_argnums=0).lower(jax.ShapeDtypeStruct((4,), "float32")).compile()


@pytest.fixture(scope="module")
def exported() -> bytes:
    import jax
    from jax import export

    function = jax.jit(lambda x, y: (x * 2 + y, y), donate_argnums=0)
    shapes = [jax.ShapeDtypeStruct((4,), "float32")] * 2
    return bytes(export.export(function, platforms=("cpu", "tpu", "cuda"))(*shapes).serialize())


def test_the_guard_would_notice(no_pickle: None) -> None:
    import io

    import numpy as np

    data = io.BytesIO()
    np.save(data, np.array([{}]), allow_pickle=True)
    data.seek(0)
    for unpickle in (
        lambda: pickle.loads(b""),
        lambda: pickle.Unpickler(data),
        lambda: np.load(data, allow_pickle=True),
    ):
        with pytest.raises(UnpickledError):
            unpickle()


def test_opening_and_calling_a_portable_program_unpickles_nothing(exported: bytes, no_pickle: None) -> None:
    import jax
    import numpy as np
    from jax import export

    program = export.deserialize(bytearray(exported))
    assert "stablehlo" in program.mlir_module()
    found, _ = jax.jit(program.call)(np.arange(4, dtype=np.float32), np.ones(4, np.float32))
    np.testing.assert_array_equal(found, [1, 3, 5, 7])


def test_arguments_and_results_of_a_portable_program_are_flat_tuples(exported: bytes) -> None:
    from jax import export, tree_util

    program = export.deserialize(bytearray(exported))
    assert program.in_tree == tree_util.tree_structure(((0, 0), {}))
    assert program.out_tree == tree_util.tree_structure((0, 0))


def test_a_node_of_another_kind_is_a_name_that_nobody_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax
    from jax import export
    from jax._src.export import _export

    monkeypatch.setattr(_export, "serialization_registry", dict(_export.serialization_registry))
    monkeypatch.setattr(_export, "deserialization_registry", dict(_export.deserialization_registry))

    class Node:
        pass

    def read(data: bytes) -> str:
        raise AssertionError("the bytes of a node were read")

    jax.tree_util.register_pytree_node(Node, lambda node: ((), "bytes of the writer"), lambda data, children: Node())
    export.register_pytree_node_serialization(
        Node, serialized_name="test.Node", serialize_auxdata=str.encode, deserialize_auxdata=read
    )
    function = jax.jit(lambda x: {"node": Node(), "x": x})
    blob = export.export(function)(jax.ShapeDtypeStruct((), "float32")).serialize()
    with pytest.raises(AssertionError, match="were read"):
        export.deserialize(blob)
    del _export.deserialization_registry["test.Node"]
    with pytest.raises(ValueError, match=r"test\.Node"):
        export.deserialize(blob)


def test_opening_and_running_a_native_program_unpickles_nothing(compiled: Any, no_pickle: None) -> None:
    import jax
    import numpy as np
    from jaxlib import _jax

    data = compiled.runtime_executable().serialize()
    device = jax.devices("cpu")[0]
    program = device.client.deserialize_executable(data, _jax.DeviceList((device,)))
    out = program.execute_sharded([jax.device_put(np.arange(4, dtype=np.float32), device)])
    np.testing.assert_array_equal(out.disassemble_into_single_device_arrays()[0][0], [1, 3, 5, 7])


def test_what_is_neither_is_an_error_and_not_unpickled(compiled: Any, exported: bytes, no_pickle: None) -> None:
    import jax
    from jax import export
    from jaxlib import _jax

    device = jax.devices("cpu")[0]
    for wrong in (exported, pickle.dumps([1]), b""):
        with pytest.raises(jax.errors.JaxRuntimeError):
            device.client.deserialize_executable(wrong, _jax.DeviceList((device,)))
    for wrong in (compiled.runtime_executable().serialize()[:4000], pickle.dumps([1]), b""):
        with pytest.raises(Exception) as caught:
            export.deserialize(bytearray(wrong))
        assert not isinstance(caught.value, UnpickledError)
