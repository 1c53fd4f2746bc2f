"""How OpenVINO's threads are bound."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from llmc.runtime.executors.openvino import device


@pytest.mark.parametrize("may", [True, False])
def test_threads_are_tied_to_cpus_only_where_they_may_be(may: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "may_pin", lambda threads: may)
    x = ops.parameter([1], np.float32)
    core = device.open_core()
    compiled = core.compile_model(ov.Model([ops.add(x, x)], [x]), "CPU", device.with_threads(1))
    stream = compiled.export_model()
    for opened in (compiled, core.import_model(stream, "CPU", device.with_threads(1))):
        assert opened.get_property("INFERENCE_NUM_THREADS") == 1
        if not may:
            assert opened.get_property("ENABLE_CPU_PINNING") is False
