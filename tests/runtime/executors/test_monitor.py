"""Monitors see what is really compiled, by whom ever, and nothing else."""

from __future__ import annotations

import io
import threading

import numpy as np
import pytest

from llmc.runtime.executors.compilations import CallsMonitor, CompilationCounter, CounterMonitor, Monitor


class Blind(Monitor):
    name = "blind"

    def __init__(self, *seen: str) -> None:
        self._seen = seen

    def what(self) -> tuple[str, ...]:
        return self._seen

    def blind(self) -> str:
        return "nobody tells it"


def test_what_nobody_can_see_is_unknown_and_never_none_of_it() -> None:
    assert Blind().count() is None
    assert Blind("one").count() == 1, "what it did see is known"


def test_a_counter_reports_what_was_compiled_at_open_and_since() -> None:
    counter = CompilationCounter()
    monitor = CounterMonitor(counter)
    assert monitor.count() == 0
    counter.opened("at open")
    counter.ready()
    counter.loaded("late")
    assert list(monitor.what()) == ["at open", "late"]


class Engine:
    def compile(self, what: str) -> str:
        return f"{what}, compiled"


def test_calls_are_seen_from_start_to_stop_by_their_names() -> None:
    monitor = CallsMonitor("calls", Engine, {"compile": lambda what: what})
    before = Engine.compile
    Engine().compile("before")
    monitor.start()
    assert Engine().compile("during") == "during, compiled"
    thread = threading.Thread(target=Engine().compile, args=("in a thread",))
    thread.start()
    thread.join()
    monitor.stop()
    Engine().compile("after")
    assert list(monitor.what()) == ["during", "in a thread"]
    assert Engine.compile is before


def test_two_monitors_of_one_class_see_each_their_own_time() -> None:
    before = Engine.compile
    first, second = (CallsMonitor("calls", Engine, {"compile": lambda what: what}) for _ in range(2))
    first.start()
    second.start()
    first.stop()
    Engine().compile("one")
    assert (first.count(), second.count()) == (0, 1)
    second.stop()
    Engine().compile("two")
    assert (first.count(), second.count()) == (0, 1)
    Engine.compile = before  # type: ignore[method-assign] # the first one's wrapper, which only passes calls on


def started(monitor: Monitor, request: pytest.FixtureRequest) -> Monitor:
    monitor.start()
    request.addfinalizer(monitor.stop)
    assert monitor.count() == 0
    return monitor


def test_a_session_that_anybody_makes_is_seen(request: pytest.FixtureRequest) -> None:
    import onnxruntime as ort

    from llmc.runtime.executors.onnxruntime.session import open_session, session_monitor

    monitor = started(session_monitor(), request)
    with pytest.raises(Exception, match=r"protobuf|global thread pool"):  # it has begun to make one
        ort.InferenceSession(b"no model", providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match="missing"):
        open_session("models/missing.onnx", threads=1)
    assert list(monitor.what()) == ["a model of 8 bytes", "missing.onnx"]


def test_a_model_that_openvino_compiles_or_imports_is_seen(request: pytest.FixtureRequest) -> None:
    from llmc.runtime.executors.openvino import import_light

    import_light()
    import openvino as ov
    from openvino import opset13 as ops

    from llmc.runtime.executors.openvino.device import compilation_monitor

    monitor = started(compilation_monitor(), request)
    given = ops.parameter([1], np.float32, name="x")
    model = ov.Model([ops.relu(given)], [given], "small")
    core = ov.Core()
    exported = core.compile_model(model, "CPU").export_model().getvalue()
    core.import_model(io.BytesIO(exported), "CPU")
    ov.compile_model(model)
    assert list(monitor.what()) == [
        "compile_model small for CPU", "import_model for CPU", "compile_model small for AUTO",
    ]  # fmt: skip


def test_a_function_that_anybody_jits_is_seen(request: pytest.FixtureRequest) -> None:
    import jax

    from llmc.runtime.executors.xla.client import JaxMonitor, open_client

    open_client("cpu", threads=1)
    monitor = started(JaxMonitor(), request)

    def late(x: object) -> object:
        return x

    jax.jit(late)(np.ones(3))
    thread = threading.Thread(target=jax.jit(lambda x: x * 2), args=(np.ones(5),))
    thread.start()
    thread.join()
    assert list(monitor.what()) == ["jax: jit(late)", "jax: jit(<lambda>)"]
