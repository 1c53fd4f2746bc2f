"""LoRA adapters over the API: listed beside the model, and chosen by the name that a request gives as its model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.startup.opening import EngineOptions
from llmc.server.loading import load
from llmc.server.state import ServerConfig
from tests.adapters import NAMES, references
from tests.server.live import completion
from tests.server.served import MODEL, Served, Ways
from tests.server.stub_engine import Api, events, refusal
from tests.toy import Toy


@pytest.fixture
def built(ways: Ways) -> Toy:
    return ways.toy


@pytest.fixture
def api(built: Toy) -> Api:
    return Api(Bundle.open(built.bundle))


def test_the_model_and_its_adapters_are_listed(served: Served) -> None:
    entries = served.get("/v1/models").json()["data"]
    assert [(entry["id"], entry["root"], entry["parent"]) for entry in entries] == [
        (MODEL, MODEL, None), *((name, name, MODEL) for name in NAMES)
    ]  # fmt: skip
    assert served.get("/v1/models/quiet").json()["id"] == "quiet"


@pytest.mark.parametrize(("model", "adapter"), [(None, 0), ("toy", 0), ("loud", 1), ("wide", 3)])
def test_a_requests_model_chooses(api: Api, model: str | None, adapter: int) -> None:
    named = {} if model is None else {"model": model}
    assert api.complete(**named).json()["model"] == (model or "toy")
    chunks = events(api.chat(stream=True, **named))
    assert {chunk["model"] for chunk in chunks[:-1]} == {model or "toy"}
    assert [request.adapter for request in api.engine.requests] == [adapter] * 2


def test_another_name_is_not_found(served: Served) -> None:
    for answer in (served.complete(model="lout"), served.chat(model="lout"), served.get("/v1/models/lout")):
        error = refusal(answer, 404)
        assert error["code"] == "model_not_found"
        assert error["message"] == (
            f"the model 'lout' is not served here; this server has '{MODEL}', 'loud', 'quiet', 'wide'"
        )
    assert served.post("/tokenize", {"prompt": "x", "model": "loud"}).status_code == 200, "its tokens are the model's"


def test_a_server_answers_with_each(served: Served, built: Toy) -> None:
    """Over a real engine, all at once."""
    prompt = [3, 5, 9, 20]
    requested = completion(prompt=prompt, return_token_ids=True)
    with ThreadPoolExecutor() as pool:
        answers = pool.map(lambda name: served.complete(**requested, model=name), (None, *NAMES))
        built_by = [answer.json()["choices"][0]["token_ids"] for answer in answers]
    assert built_by == [wanted.greedy(prompt, 4) for wanted in references(built.model)]


def test_the_model_is_not_called_as_an_adapter_is(built: Toy) -> None:
    config = ServerConfig(served_model_name="loud")
    with pytest.raises(InputError, match="--served-model-name loud: an adapter of the bundle is called that"):
        load(lambda _: Path(built.bundle), config, EngineOptions(), None, lambda _: None)  # type: ignore[arg-type]
