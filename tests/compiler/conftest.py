from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.artifacts.store.store import Store
from llmc.buckets.limits import Limits
from llmc.testing.toy import toy_plan, write_toy
from tests.compiler.keyed import DEVICES, Compiled, Keyed, Keys
from tests.toy import Toy

SMALL = toy_plan([(1, 16, 0)], [(1, 15)], Limits(16, 1, 16, 8))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """A compile of a tiny model for each device, made when it is first asked for, and its keys."""
    built: dict[str, tuple[Keyed, Keys]] = {}

    def get(device: str) -> tuple[Keyed, Keys]:
        if device not in built:
            folder = tmp_path_factory.mktemp(device)
            if device == "fake":
                model, options = write_toy(folder / "model"), {}
            else:
                from tests.compiler import tiny

                model, options = tiny.write_model(folder / "model", "qwen2"), {"quantize": "none"}
            named = {"cpu": "onnxruntime"}.get(device, device)
            keyed = Keyed(model, Store(folder / "store"), SMALL, {"device": named, "specialise": True, **options})
            keyed.build()
            built[device] = keyed, keyed.ask()
        return built[device]

    return get


@pytest.fixture(params=DEVICES)
def keyed(request: pytest.FixtureRequest, compiled: Compiled) -> Keyed:
    return compiled(request.param)[0]


@pytest.fixture(scope="module", autouse=True)
def _toys_are_verified() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Toy, "verifies", True)
        yield


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy.make(tmp_path)
