"""Toy bundles of both kinds, one executable a bucket and one for any shape, compiled once."""

from __future__ import annotations

import pytest

from llmc.compiler.verification.toy_reference import ToyReference
from tests.toy import Toy, reference


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Toy]:
    static = Toy.make(tmp_path_factory.mktemp("toy"))
    static.compile()
    exact = Toy(static.model, static.store, static.bundle.with_name("exact"), static.plan)
    exact.compile(specialise=False)
    return {"static": static, "exact": exact}


@pytest.fixture(scope="session", params=["static", "exact"])
def toy(request: pytest.FixtureRequest, toys: dict[str, Toy]) -> Toy:
    return toys[request.param]


@pytest.fixture(scope="session")
def trusted(toys: dict[str, Toy]) -> ToyReference:
    return reference(toys["static"].model)
