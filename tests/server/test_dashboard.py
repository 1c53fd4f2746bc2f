"""The dashboard in a browser: what it shows, what it requests, and that no name becomes markup."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, Page, expect

from llmc.server import aside
from llmc.server.state import Progress
from tests.browsers import chromium
from tests.server.live import Live, toy_bundle
from tests.server.pages import Invented, Site

pytestmark = pytest.mark.full

SOONER = "{ const later = setTimeout; window.setTimeout = (work, ms) => later(work, ms / 10); }"
"""In a page: what it does each second it does each tenth, so that nobody waits for a second."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def built() -> Invented:
    return Invented()


@pytest.fixture
def site(built: Invented) -> Iterator[Site]:
    with Site(built.app()) as running:
        yield running


@pytest.fixture
def open_page(browser: Browser, site: Site) -> Iterator[Callable[..., Page]]:
    """Opens the dashboard; at the end nothing was wrong on any page, and nothing was asked of anybody else."""
    contexts, wrong, requested = [], [], []

    def opened(**options: object) -> Page:
        context = browser.new_context(**options)  # type: ignore[arg-type]
        contexts.append(context)
        context.set_default_timeout(10_000)
        page = context.new_page()
        page.add_init_script(SOONER)
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))
        page.goto(f"{site.url}/dashboard")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []
    assert {url.removeprefix(site.url) for url in requested} <= {
        "/dashboard", "/dashboard/data", "/dashboard/replan", "data:,"
    }  # fmt: skip


def test_the_grid_shows_what_ran(built: Invented, open_page: Callable[..., Page]) -> None:
    built.serve("toy")
    built.load(5)
    for name in ("runs", "waits", "waits, too"):
        built.state.snapshot.arrived(name, 3)
    built.state.snapshot.admitted("runs", 0.0, 0)
    page = open_page()
    expect(page.locator("#phase")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text("toy")
    decode = page.locator("td[aria-label^='decode 4×1+16:']")
    expect(decode).to_have_text("25%")
    expect(decode).to_have_attribute(
        "title", re.compile(r"10 steps, 3\.0 live rows per step, 25% padding, 67% of the step time")
    )
    expect(page.locator("td[aria-label^='prompt 1×16+0:']")).to_have_text("44%")
    unused = page.locator("td[aria-label='decode 1×1+8: unused']")
    expect(unused).to_have_text("")
    assert _background(page, "td[aria-label^='decode 4×1+16:']") != _background(page, "td[aria-label^='decode 1×1+8:']")
    expect(page.get_by_role("heading", name="Prompt with 24 cached tokens")).to_be_visible()
    expect(page.locator("#detail-decode")).to_have_text("1 of 5 buckets used")
    assert _tile(page, "Generated") == "7"
    assert (_tile(page, "Running"), _tile(page, "Waiting")) == ("1", "2")
    assert _tile(page, "KV cache") == "38%"
    assert _tile(page, "Compilations") == "0"
    assert page.locator("#plots polyline.s0").first.get_attribute("points").count(",") == 5  # type: ignore[union-attr]


def test_what_runs_later_shows_without_a_reload(built: Invented, open_page: Callable[..., Page]) -> None:
    built.serve("toy")
    page = open_page()
    expect(page.locator("#detail-decode")).to_have_text("0 of 5 buckets used")
    built.load(2)
    expect(page.locator("td[aria-label^='decode 4×1+16:']")).to_have_text("25%")
    built.clock.now += 120
    expect(page.locator("#detail-decode")).to_have_text("0 of 5 buckets used")
    page.get_by_role("radio", name="since the start").check()
    expect(page.locator("#detail-decode")).to_have_text("1 of 5 buckets used")
    expect(page.locator("#totals")).to_contain_text(re.compile(r"requests finished\s*2"))


def test_loading_shows_how_far_it_is(built: Invented, open_page: Callable[..., Page]) -> None:
    built.loading(Progress("warm", 3, 8, 12.4))
    page = open_page()
    expect(page.locator("#phase")).to_have_text("loading")
    bar = page.get_by_role("progressbar", name="Loading")
    expect(bar).to_be_visible()
    assert bar.evaluate("bar => bar.value / bar.max") == 3 / 8
    expect(page.locator("#progress-text")).to_have_text("warm: 3 of 8, about 12 s left")
    expect(page.locator("#buckets")).to_be_hidden()
    built.loading(Progress("tokenizer"))
    expect(page.locator("#progress-text")).to_have_text("tokenizer")
    assert not bar.evaluate("bar => bar.hasAttribute('value')")
    built.serve("toy")
    expect(page.locator("#phase")).to_have_text("ready")
    expect(bar).to_be_hidden()
    expect(page.locator("#buckets")).to_be_visible()


def test_a_server_that_drains_or_died_says_so(built: Invented, open_page: Callable[..., Page]) -> None:
    built.serve("toy")
    built.state.draining = True
    page = open_page()
    expect(page.locator("#phase")).to_have_text("draining")
    built.engine.error = RuntimeError("boom")
    expect(page.locator("#phase")).to_have_text("dead")
    expect(page.locator("#loading")).to_contain_text("An error stopped the server.")


def test_a_compilation_while_serving_is_red(built: Invented, open_page: Callable[..., Page]) -> None:
    built.serve("toy")
    page = open_page()
    compilations = page.locator("#tiles > div", has_text="Compilations").locator("dd").first
    expect(compilations).to_have_text("0")
    expect(compilations).not_to_have_class("bad")
    built.compiled(2)
    expect(compilations).to_have_text("2")
    expect(compilations).to_have_class("bad")


HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\"'&amp;"


def test_a_name_is_text_whatever_it_holds(built: Invented, open_page: Callable[..., Page]) -> None:
    built.serve(HOSTILE)
    built.loading(Progress(HOSTILE))
    built.load(2)
    page = open_page()
    expect(page.locator("#model")).to_have_text(HOSTILE)
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    assert page.evaluate("window.hacked") is None
    assert HOSTILE in page.title()


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_narrow_and_wide_light_and_dark(
    built: Invented, open_page: Callable[..., Page], width: int, scheme: str
) -> None:
    built.serve("a-model-with-a-long-name-" + "x" * 60)
    built.load(3)
    page = open_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    expect(page.locator("td[aria-label^='decode 4×1+16:']")).to_have_text("25%")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for of in ("body", "td[aria-label^='decode 4×1+16:']", "td[aria-label^='decode 1×1+8:']"):
        text, ground = (_color(page, of, what) for what in ("color", "backgroundColor"))
        assert (_luminance(text) > _luminance(ground)) == (scheme == "dark")
        assert _contrast(text, ground) >= 4.5, (of, text, ground)


def test_what_another_plan_would_save(built: Invented, open_page: Callable[..., Page]) -> None:
    """Prompts of 9 tokens in buckets of 16."""
    built.serve("toy")
    page = open_page()
    expect(page.locator("#replan")).to_be_hidden()
    built.load(20)
    page.get_by_role("button", name="Compute").click()
    expect(page.locator("#replan-text")).to_contain_text("from 20 requests", timeout=30_000)
    cells = page.locator("#replan-table tbody tr").first.locator("td").all_text_contents()
    assert int(cells[0].removesuffix("%")) > int(cells[1].removesuffix("%"))
    assert cells[3] == "6"


def test_a_plan_that_cannot_be_built_says_why(
    built: Invented, open_page: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    built.serve("toy")
    built.load(2)
    page = open_page()
    monkeypatch.setattr(aside, "TIMEOUT_S", 0.0)
    page.get_by_role("button", name="Compute").click()
    expect(page.locator("#replan-text")).to_contain_text(re.compile("planning took more than"), timeout=30_000)
    monkeypatch.undo()
    monkeypatch.setattr(aside, "_MODULE", "llmc.no_such_module")
    page.get_by_role("button", name="Compute").click()
    expect(page.locator("#replan-text")).to_contain_text("planning ended with 1", timeout=30_000)


def test_cells_are_reached_by_keyboard(built: Invented, open_page: Callable[..., Page]) -> None:
    built.serve("toy")
    built.load(1)
    page = open_page()
    grid = page.get_by_role("grid", name="Decode")
    expect(grid).to_be_visible()
    assert grid.locator("td[tabindex='0']").count() == 1
    grid.locator("td[tabindex='0']").focus()
    expect(page.locator("#detail-decode")).to_have_text("decode 1×1+8: unused")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowUp", "ArrowUp", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    expect(page.locator("#detail-decode")).to_contain_text("decode 4×1+16: 2 steps, 3.0 live rows per step")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("decode 4×1+16")
    assert grid.locator("td[tabindex='0']").count() == 1


def test_a_server_that_is_gone_is_noticed(built: Invented, site: Site, browser: Browser) -> None:
    built.serve("toy")
    page = browser.new_page()
    page.goto(site.url)
    expect(page.locator("#phase")).to_have_text("ready")
    site.stop()
    expect(page.locator("#phase")).to_have_text("no response")
    page.close()


def test_the_key_is_requested(built: Invented, browser: Browser) -> None:
    built.serve("toy")
    keys = ["first"]
    with Site(built.app(lambda: tuple(keys))) as site:
        without = browser.new_page()
        try:
            refused = without.goto(f"{site.url}/dashboard")
            assert refused is None or refused.status == 401
        except Error as error:
            assert "ERR_INVALID_AUTH_CREDENTIALS" in str(error)
        without.close()
        context = browser.new_context(http_credentials={"username": "anyone", "password": "first"})
        page = context.new_page()
        page.goto(f"{site.url}/dashboard")
        expect(page.locator("#phase")).to_have_text("ready")
        expect(page.locator("#key")).to_be_hidden()
        keys[:] = ["second"]
        expect(page.get_by_label("API key", exact=True)).to_be_visible()
        expect(page.locator("#phase")).to_have_text("API key required")
        page.get_by_label("API key", exact=True).fill("second")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("#phase")).to_have_text("ready")
        expect(page.locator("#key")).to_be_hidden()
        assert page.evaluate("sessionStorage.getItem('llmc-api-key')") == "second"
        assert page.evaluate("localStorage.length") == 0
        assert "second" not in page.url
        context.close()


def test_on_a_real_server(tmp_path: Path, browser: Browser) -> None:
    with Live(toy_bundle(tmp_path)) as live:
        live.ready()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{live.port}/dashboard")
        expect(page.locator("#phase")).to_have_text("ready")
        assert live.complete().status == 200
        expect(page.locator("#totals")).to_contain_text(re.compile(r"requests finished\s*1"))
        page.get_by_role("radio", name="since the start").check()
        expect(page.locator("#phases td[aria-label*='live rows per step']").first).to_be_visible()
        assert _tile(page, "Compilations") == "0"
        page.close()


def _tile(page: Page, name: str) -> str | None:
    return page.locator("#tiles > div", has_text=name).locator("dd").first.text_content()


def _background(page: Page, of: str) -> object:
    return page.locator(of).evaluate("node => getComputedStyle(node).backgroundColor")


def _color(page: Page, of: str, what: str) -> tuple[int, ...]:
    """Red, green and blue as painted, of whatever notation."""
    return tuple(
        page.locator(of).evaluate(
            """(node, what) => {
                const paint = document.createElement("canvas").getContext("2d");
                paint.fillStyle = getComputedStyle(node)[what];
                paint.fillRect(0, 0, 1, 1);
                return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
            }""",
            what,
        )
    )


def _luminance(color: tuple[int, ...]) -> float:
    """Relative luminance, WCAG 2."""
    parts = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def _contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)
