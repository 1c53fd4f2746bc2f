"""The site is built from docs/ without a warning, loads nothing from elsewhere, and has every export."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import llmc
from llmc.cli.main import main
from scripts import site_pages
from tests.docs.commands import ROOT
from tests.tiers import default_cases, full

API = (ROOT / "docs" / "api.md").read_text()
LOADED = re.compile(r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?([^"' >]+)|<link[^>]*\shref=["']?([^"' >]+)""")
VARIABLE = re.compile(r"VLLM_[A-Z_{}|0-9]+")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    done = built(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def built(configuration: Path, into: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(configuration), "-d", str(into)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@full
def test_every_document_is_a_page_that_the_navigation_has(site: Path) -> None:
    for document in (ROOT / "docs").rglob("*.md"):
        name = document.relative_to(ROOT / "docs").with_suffix("")
        assert (site / ("index.html" if name.name == "index" else f"{name}/index.html")).exists()
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert not {str(d.relative_to(ROOT / "docs")) for d in (ROOT / "docs").rglob("*.md")} - listed
    for page in ("repository/benchmarks/RESULTS", "repository/SECURITY", "repository/llmc/compiler/targets/fake.py"):
        assert (site / page / "index.html").exists(), "what pages link to outside docs/"


@full
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loaded = [one or other for one, other in LOADED.findall(page.read_text())]
        assert loaded and not [url for url in loaded if re.match(r"(\w+:)?//", url)], page


@full
def test_the_reference_has_every_export_with_its_docstring(site: Path) -> None:
    named = set(re.findall(r"^::: llmc\.(\w+)$", API, re.MULTILINE)) - {"errors"}
    assert named == set(llmc.__all__), "docs/api.md"
    page = (site / "api" / "index.html").read_text()
    for name in llmc.__all__:
        assert re.search(rf'id="llmc\.(\w+\.)*{name}"', page), name
    assert "Ahead-of-time compilation of LLM graphs" in (site / "index.html").read_text()
    assert "Needs the extra <code>compile</code>" in page


@full
def test_the_options_of_commands_and_the_variables_are_on_their_pages(site: Path) -> None:
    page = (site / "commands" / "index.html").read_text()
    assert 'id="llmc-compile"' in page and 'id="llmc-cache-gc"' in page and "--prompt-batch" in page
    listed = (site / "environment" / "index.html").read_text()
    assert re.search(r"<pre>.*LLMC_CACHE_DIR.*LLMC_REMOTE_CACHE", listed, re.DOTALL), "one variable a line"


def test_the_page_of_commands_lists_every_command_that_there_is() -> None:
    listed = set()
    for line in (ROOT / "docs" / "commands.md").read_text().splitlines():
        if line.startswith("| `") and len(cells := line.split(" | ")) == 2:
            for name in re.findall(r"`(\w[^`]*)`", cells[0].replace("`llmc …`", "")):
                listed |= {f"llmc {name}", *(f"llmc {name} {verb}" for verb in re.findall(r"`(\w+)`", cells[1]))}
    paths = {path for path, _ in site_pages.commands()}
    assert listed == paths | {" ".join(path.split()[:2]) for path in paths}


@pytest.mark.parametrize("command", ["compile", "plan", "serve", "cache gc"])
def test_the_reference_of_commands_has_every_option(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    section = site_pages.reference().partition(f"### llmc {command}\n")[2].partition("\n### ")[0]
    assert main([*command.split(), "--help" if command == "cache gc" else "--help-all"]) == 0
    said = capfd.readouterr().out
    missing = {flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+(?=[ ,])", said) if flag not in section}
    assert len(section) > 500 and not missing
    if command == "compile":
        assert "**Options of cpu, onnxruntime" in section and "llmc compile smollm2-demo -o bundle" in section


def test_every_variable_of_vllm_is_on_the_page_for_those_who_come_from_there() -> None:
    from llmc import settings

    page = (ROOT / "docs" / "environment.md").read_text()
    plain = {name for name in VARIABLE.findall(settings.__doc__ or "") if "{" not in name}
    assert len(plain) > 15
    assert not {name for name in plain if f"`{name}" not in page}


@default_cases(1)
@pytest.mark.parametrize(
    ("link", "said"),
    [("gone.md", "gone.md"), ("other.md#none", "#none"), ("../scripts/none.py", "none.py"), ("/top.md", "top.md")],
)
def test_a_link_that_leads_nowhere_fails_the_build(link: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n[link]({link}) [fine](other.md#here)\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n## Here\n")
    text = (ROOT / "mkdocs.yml").read_text().replace("scripts/site_pages.py", str(ROOT / "scripts" / "site_pages.py"))
    (tmp_path / "mkdocs.yml").write_text(text[: text.index("\nnav:")] + "\nnav: [index.md, other.md]\n")
    done = built(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0 and said in done.stderr, done
