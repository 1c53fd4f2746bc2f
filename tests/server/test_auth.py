"""Keys: every route but /health and /ready asks for one."""

from __future__ import annotations

import base64

import pytest

from llmc.errors import InputError
from llmc.server.app import ROUTERS
from llmc.server.clients import OPEN_PATHS
from tests.server.served import KEYS
from tests.server.stub_engine import refusal

ROUTES = sorted({(route.path, method) for router in ROUTERS for route in router.routes for method in route.methods})


@pytest.fixture
def keyed(make_api):
    return make_api(api_keys=KEYS)


@pytest.fixture
def keyless(served):
    """Its clients send what a test gives them."""
    return served.without_key


def basic(user, password):
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _routes(route):
    """A route, or those of a router: older FastAPI copies a router's routes into the app, newer FastAPI holds it."""
    return route.original_router.routes if hasattr(route, "original_router") else [route]


def test_the_routes_to_walk_are_all_there(keyed):
    paths = {path for path, _ in ROUTES}
    assert paths >= {"/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/dashboard", "/tokenize"}
    assert paths > OPEN_PATHS
    documented = {path.replace(":path}", "}") for path in paths}
    assert set(keyed.app.openapi()["paths"]) <= documented
    served = [inner for route in keyed.app.routes for inner in _routes(route)]
    assert {route.path for route in served} == paths | {"/openapi.json"}


@pytest.mark.parametrize(("path", "method"), [*ROUTES, ("/openapi.json", "GET"), ("/nothing", "GET"), ("/", "OPTIONS")])
def test_every_route_but_two_requests_a_key(keyless, path, method):
    answer = keyless.ask(method, path.replace("{name:path}", "toy"), json={})
    assert (answer.status_code != 401) == (path in OPEN_PATHS), answer.text
    if answer.status_code == 401 and method != "HEAD":
        assert refusal(answer, 401)["code"] == "invalid_api_key"
        assert [c.split()[0] for c in answer.headers.get_list("www-authenticate")] == ["Bearer", "Basic"]


@pytest.mark.parametrize("path", ["/health/", "//health", "/health/../v1/models", "/HEALTH", "/ready?x=1/../v1/models"])
def test_no_spelling_of_an_open_path_opens_another(keyless, path):
    answer = keyless.get(path)
    assert answer.status_code == (200 if path.startswith("/ready?") else 401)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER   {}"])
def test_each_key_opens(keyless, key, form):
    headers = {"Authorization": form.format(key).encode()}
    assert keyless.ask("GET", "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("user", ["", "anyone"])
def test_browsers_send_the_key_as_a_password(keyless, key, user):
    assert keyless.get("/dashboard", Authorization=basic(user, key)).status_code == 200
    assert keyless.get("/", Authorization=basic(user, key)).headers["location"] == "/dashboard"


@pytest.mark.parametrize(
    "header",
    [
        b"", b"Bearer", b"Basic", b"Bearer wrong", b"Bearer first-ke", b"Bearer first-key2", b"first-key",
        b"Basic first-key", b"Basic !!!", b"Token first-key", b"Bearer first-key, Bearer first-key",
        b"Bearer \xff\xfe", basic("first-key", "").encode(), basic("first-key", "wrong").encode(),
        base64.b64encode(b"first-key"), "Bearer clé-ñ-鍵x".encode(), b"Bearer \xe9",
    ],
)  # fmt: skip
def test_nothing_else_does(keyless, header):
    refusal(keyless.ask("GET", "/v1/models", headers={"Authorization": header}), 401)


def test_two_headers_are_none(keyless):
    headers = [("Authorization", "Bearer first-key"), ("Authorization", "Bearer first-key")]
    refusal(keyless.ask("GET", "/v1/models", headers=headers), 401)


def test_no_key_in_the_address_or_elsewhere_opens(keyless):
    refusal(keyless.get("/v1/models?api_key=first-key", **{"x-key": "first-key", "api-key": "first-key"}), 401)


def test_without_a_body_being_read(keyed):
    async def body():
        raise AssertionError("the body was read")
        yield b""

    answer = keyed.ask("POST", "/v1/completions", content=body(), headers={"Content-Type": "application/json"})
    refusal(answer, 401)


def test_no_keys_no_question(make_api):
    assert make_api().get("/v1/models").status_code == 200


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_refused_at_the_start(make_api, key):
    with pytest.raises(InputError, match="empty"):
        _ = make_api(api_keys=("good", key)).app


def test_a_websocket_is_closed(keyed):
    import asyncio

    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(keyed.app({"type": "websocket", "path": "/v1/models", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]
