from __future__ import annotations

from pathlib import Path

import pytest

from llmc.runtime.bundle import Bundle
from llmc.runtime.certificate.certifying import Certifying, CertifyOptions
from llmc.runtime.certificate.document import Certificate
from llmc.runtime.startup.opening import EngineOptions
from tests.toy import Toy
from tests.toys import toy, toys

__all__ = ["toy", "toys"]


@pytest.fixture(autouse=True)
def _own_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compile caches that nobody else writes to."""
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "NEURON_COMPILE_CACHE_URL", "LLMC_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "caches" / variable.lower()))


def certify(bundle: Path, requests: int = 60, seed: int = 0) -> Certificate:
    return Certifying(Bundle.open(bundle), EngineOptions(threads=1), CertifyOptions(requests, seed)).run()


@pytest.fixture(scope="session")
def certified(toys: dict[str, Toy]) -> Certificate:
    """Of the toy with an executable for each bucket."""
    return certify(toys["static"].bundle)
