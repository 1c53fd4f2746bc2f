"""Toy bundles of every kind, compiled once: one executable a bucket; one for any shape, as exact rectangles, as rows of
any lengths, and as these over a pool of tokens that has room for two sequences of full length."""

from __future__ import annotations

import pytest

from llmc.compiler.verification.toy_reference import ToyReference
from tests.toy import Toy, reference

POOL = 72


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Toy]:
    static = Toy.make(tmp_path_factory.mktemp("toy"))
    static.compile()
    built = {"static": static}
    for kind, device in (("exact", "fake"), ("ragged", "fake:ragged"), ("paged", f"fake:paged={POOL}")):
        built[kind] = Toy(static.model, static.store, static.bundle.with_name(kind), static.plan)
        built[kind].compile(device=device, specialise=False)
    return built


@pytest.fixture(scope="session", params=["static", "exact", "ragged", "paged"])
def toy(request: pytest.FixtureRequest, toys: dict[str, Toy]) -> Toy:
    return toys[request.param]


@pytest.fixture(scope="session")
def trusted(toys: dict[str, Toy]) -> ToyReference:
    return reference(toys["static"].model)
