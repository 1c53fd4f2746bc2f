"""`llmc cache ls --plot`: a page, or a picture, of a store; in a browser too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.digest import Blob
from llmc.artifacts.overview import draw
from llmc.artifacts.overview.survey import take
from llmc.artifacts.overview.tables import LONGEST
from llmc.artifacts.signing.keyring import Keyring
from llmc.artifacts.store.layout import Layout
from llmc.artifacts.store.store import Store
from tests.artifacts.helpers import files_below, key
from tests.browsers import chromium
from tests.cli.helpers import Llmc
from tests.tiers import full

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>$\\frac{a}$&amp;\x1b"


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "cache")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that is allowed nothing but its own file; at the end nothing was wrong on it."""
    wrong: list[str] = []
    requested: list[str] = []
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.set_default_timeout(10_000)
    opened.on("console", lambda message: wrong.append(message.text))
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("request", lambda request: requested.append(request.url))
    yield opened
    opened.close()
    assert wrong == []
    assert len(requested) == 1


def column(page: Page, heading: str, number: int) -> list[str]:
    """The cells of a column of the table below a heading."""
    return page.locator(f"h3:has-text('{heading}') + div tbody td:nth-child({number})").all_text_contents()


def test_a_page_reports_of_bundles_entries_and_pins(llmc: Llmc, bundle: Path) -> None:
    pinned = llmc("cache", "pin", bundle, "--json").json["pins"][0]["key"].removeprefix("sha256:")
    ran = llmc("cache", "ls", "--plot", "store.html")
    assert ran.err == "wrote store.html\n"
    assert ran.out == ""
    text = Path("store.html").read_text()
    plan = read_manifest(bundle).provenance["plan"]
    for said in (
        plan[:12], pinned[:12], "toy for fake, 6 executables", "fake, native", "llmc cache gc --max-age 30d",
        "Kept whatever the limits are (1)",
    ):  # fmt: skip
        assert said in text, said
    assert text.count("<svg ") == 3
    assert set(re.findall(r"[a-z]+://[^\s\"'<>]+", text)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_a_picture_is_drawn_beside_the_json(llmc: Llmc, bundle: Path) -> None:
    ran = llmc("cache", "ls", "--kind", "bundle", "--json", "--plot", "store.png")
    assert [entry["kind"] for entry in ran.json["entries"]] == ["bundle"]
    assert Path("store.png").read_bytes().startswith(b"\x89PNG")


@full
def test_a_store_is_only_read_and_equal_stores_are_equal_pages(llmc: Llmc, bundle: Path, layout: Layout) -> None:
    before = {path: path.stat().st_mtime_ns for path in files_below(layout.root)}
    survey, keyring = take(Store(layout.root)), Keyring(layout.root)
    for name in ("a.html", "b.html", "a.png", "b.png"):
        draw(Path(name), survey, keyring, lambda entry: entry.key.short)
    assert Path("a.html").read_bytes() == Path("b.html").read_bytes()
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
    assert {path: path.stat().st_mtime_ns for path in files_below(layout.root)} == before


@pytest.mark.parametrize("name", ["store.html", "store.png"])
def test_a_store_that_does_not_exist_is_drawn_as_an_empty_one(llmc: Llmc, layout: Layout, name: str) -> None:
    assert llmc("cache", "ls", "--plot", name).err == f"wrote {name}\n"
    assert Path(name).stat().st_size > 2000
    assert not layout.root.exists()


def test_a_damaged_entry_is_put_aside_and_reported(llmc: Llmc, layout: Layout) -> None:
    Store(layout.root).publish(key(), {})
    layout.entry("executable", key().hex).write_bytes(b"torn")
    assert llmc("cache", "ls", "--plot", "store.html").code == 0
    assert "Damaged entries, left out: 1;" in Path("store.html").read_text()
    assert len(files_below(layout.quarantine)) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("store.pdf", "cannot draw to store.pdf: give a file name that ends in .png or .html"),
        ("absent/store.html", "cannot write the plots to absent/store.html: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_drawn_to_is_one_clear_line(llmc: Llmc, name: str, message: str) -> None:
    assert llmc("cache", "ls", "--plot", name).failed(2) == message


@pytest.mark.full
def test_the_page_in_a_browser(llmc: Llmc, layout: Layout, here: Path, page: Page) -> None:
    store = Store(layout.root)
    for size in (900, 20_000, 3_000):
        store.publish(key(batch=size), {"graph": store.put_bytes(b"g" * size)})
    llmc("cache", "ls", "--plot", "store.html")
    page.goto((here / "store.html").as_uri())
    expect(page.get_by_role("heading", level=1)).to_contain_text("on disk, 3 entries")
    expect(page.locator("figure svg")).to_have_count(2)
    assert column(page, "The largest (3)", 5) == ["19.53", "2.93", "0.88"]
    assert column(page, "The largest (3)", 1) == ["executable"] * 3
    head = page.locator("h3:has-text('The largest') + div th", has_text="KiB")
    orders = set()
    for _ in range(2):
        head.click()
        orders.add(tuple(column(page, "The largest", 5)))
    assert orders == {("0.88", "2.93", "19.53"), ("19.53", "2.93", "0.88")}
    keys = column(page, "The largest", 2)
    orders = set()
    for _ in range(2):
        page.locator("h3:has-text('The largest') + div th").nth(1).click()
        orders.add(tuple(column(page, "The largest", 2)))
    assert orders == {tuple(sorted(keys)), tuple(sorted(keys, reverse=True))}, "by name"
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


@pytest.mark.full
def test_a_name_is_text_whatever_it_holds(llmc: Llmc, layout: Layout, here: Path, page: Page) -> None:
    store = Store(layout.root)
    digest = store.put_bytes(b"g").digest
    meta = {"model": HOSTILE, "device": HOSTILE, "executables": HOSTILE}
    store.publish(key("bundle", name=HOSTILE), {HOSTILE: Blob(digest, 1)}, meta)
    store.publish(key("executable", target=HOSTILE, state=HOSTILE), {"graph": Blob(digest, 1)})
    folder = here / "a $\\frac{1}$<b>"
    folder.mkdir()
    assert llmc("cache", "ls", "--plot", folder / "store.html").code == 0
    page.goto((folder / "store.html").as_uri())
    assert column(page, "In the store (1)", 1) == [HOSTILE[: LONGEST - 1] + "…"]
    assert column(page, "Executables by device", 1)[0].startswith(HOSTILE[: LONGEST - 1])
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0 and page.locator("script").count() == 1
