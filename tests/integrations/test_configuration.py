"""What a server is started with, read from wherever it stands; what disagrees or cannot be read is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from llmc.buckets.limits import Limits
from llmc.buckets.planner.planner import make_plan
from llmc.errors import InputError, UnknownNameError
from llmc.integrations import configuration
from llmc.integrations.base import Setup
from llmc.integrations.configuration import load, setup_for
from llmc.integrations.plan import ServerPlan
from tests.integrations.fake import Fake

LISTS = {"tokens": ((1,), (64,)), "decode": ((8,),)}


def written(folder: Path, fake: Fake, setup: Setup) -> Path:
    configuration.write_folder(folder, fake.export(setup, LISTS), "fake", "<html></html>", ["from here"])
    return folder


def test_a_folder_that_was_exported_is_read_back(fake: Fake, tmp_path: Path) -> None:
    setup = setup_for(fake, {"max_model_len": 64, "max_num_seqs": 4}, {"gap": 3})
    found = load(fake, str(written(tmp_path / "a", fake, setup)), {}, {})
    assert (found.setup, found.lists) == (setup, LISTS)
    assert sorted(entry.name for entry in (tmp_path / "a").iterdir()) == [
        "arguments", "environment", "kubernetes-env.yaml", "lists.txt", "report.html",
    ]  # fmt: skip
    assert "FAKE_LISTS=lists.txt\n" in (tmp_path / "a" / "environment").read_text()
    for name in ("arguments", "environment", "kubernetes-env.yaml", "lists.txt"):
        text = (tmp_path / "a" / name).read_text()
        assert text.startswith("# from here\n") and str(tmp_path) not in text
    assert "--json '{\"a\": 1}'\n" in (tmp_path / "a" / "arguments").read_text()


def test_a_container_finds_the_file_where_it_is_mounted(fake: Fake, setup: Setup) -> None:
    text = configuration.kubernetes_text(fake.export(setup, LISTS), "fake")
    assert '  - name: FAKE_LISTS\n    value: "/etc/llmc/lists.txt"\n' in text
    assert '  - "--max-model-len=64"\n' in text
    assert '  "lists.txt": |\n    tokens 1 64\n' in text


@pytest.mark.parametrize(
    "text",
    [
        "fake serve model --max-model-len 64 --max_num_seqs=8",
        "export FAKE_GAP=0\nfake serve model \\\n  --max-model-len 64 \\\n  --max-num-seqs 8 # eight\n",
        "FAKE_GAP=0 fake serve --max-model-len=64",
    ],
)
def test_a_command_line_is_read(fake: Fake, setup: Setup, tmp_path: Path, text: str) -> None:
    (tmp_path / "command.sh").write_text(text)
    found = load(fake, str(tmp_path / "command.sh"), {}, {})
    assert (found.setup, found.lists) == (setup, fake.default(setup))


def test_a_log_is_read(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("starting --x\nPrepared tokens 1 64\nready\nPrepared decode 8\n")
    assert load(fake, str(tmp_path / "server.log"), {"max_model_len": 64}, {}).lists == LISTS


def test_the_servers_own_file_is_read(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "lists.txt").write_text("tokens 1 64\ndecode 8\n")
    assert load(fake, str(tmp_path / "lists.txt"), {"max_model_len": 64}, {}).lists == LISTS


def test_plans_are_read(fake: Fake, setup: Setup, tmp_path: Path) -> None:
    ServerPlan("fake", setup, LISTS, "here", {"requests": 3}).save(tmp_path / "server.json")
    assert load(fake, str(tmp_path / "server.json"), {}, {}).lists == LISTS
    make_plan(Limits(64, 8, 64, 8)).save(tmp_path / "plan.json")
    assert load(fake, str(tmp_path / "plan.json"), {}, {}).lists["decode"] == ((1,), (2,), (4,), (8,))


@pytest.mark.parametrize(
    ("text", "limits", "message"),
    [
        ("--max-model-len 64 --max-num-seqs 4", {"max_num_seqs": 8}, "says max_num_seqs 4, but 8 was given"),
        ("--max-num-seqs 4", {}, "fake needs max_model_len"),
        ("--max-model-len many", {}, "--max-model-len 'many' is not a whole number"),
        ("--max-model-len 64 --gap x", {}, "FAKE_GAP 'x' is not of type int"),
        ("--max-model-len 64 --gap -1", {}, "FAKE_GAP -1 must be at least 0"),
        ("--max-model-len 64 'open", {}, "command:1: No closing quotation"),
        ('{"schema": 1, "server": "vllm"}', {}, "field 'limits' is missing"),
        ('{"schema": 2, "server": "fake"}', {}, "field 'schema' is 2"),
        ("{", {}, "not valid JSON"),
    ],
)
def test_what_cannot_be_used_is_named(
    fake: Fake, tmp_path: Path, text: str, limits: dict[str, int], message: str
) -> None:
    (tmp_path / "command").write_text(text)
    with pytest.raises(InputError, match=message):
        load(fake, str(tmp_path / "command"), limits, {})


def test_what_is_not_there_is_named(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the configuration .*absent"):
        load(fake, str(tmp_path / "absent"), {"max_model_len": 64}, {})
    with pytest.raises(InputError, match="holds no configuration"):
        load(fake, str(tmp_path), {"max_model_len": 64}, {})


def test_a_plan_of_another_server_is_refused(fake: Fake, setup: Setup, tmp_path: Path) -> None:
    text = ServerPlan("fake", setup, LISTS, "here").to_json().replace('"server": "fake"', '"server": "absent"')
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UnknownNameError, match=r"unknown server .absent.; known: .*vllm"):
        load(fake, str(tmp_path / "plan.json"), {}, {})


shape_lists = st.sets(st.integers(1, 64), min_size=1).map(lambda found: tuple((n,) for n in sorted(found)))


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape_lists, shape_lists, st.integers(0, 9))
def test_a_plan_reads_back_as_it_was(fake: Fake, tokens, decode, gap: int) -> None:
    setup = setup_for(fake, {"max_model_len": 64}, {"gap": gap})
    plan = ServerPlan("fake", setup, {"tokens": tokens, "decode": decode}, "here", {"a": 1})
    assert ServerPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[[8]]", "[[8], [8]]"), r"lists.decode\[1\]' must be above the one before"),
        (("[[8]]", "[[8, 1]]"), r"lists.decode\[0\]' must be \[batch\]"),
        (("[[8]]", "[[-8]]"), "whole numbers from 0"),
        (("[[8]]", "8"), "must be an array"),
        (('"gap": 0', '"gap": -1'), "field 'settings': FAKE_GAP -1"),
        (('"gap": 0', '"gip": 0'), "unknown setting of this server 'gip'"),
        (('"decode": [[8]], ', ""), "'lists.decode' is missing"),
        (('"facts": {}', '"facts": {}, "more": 1'), "'more' is unknown"),
    ],
)
def test_a_damaged_plan_is_refused_by_field(fake: Fake, setup: Setup, change: tuple[str, str], message: str) -> None:
    text = ServerPlan("fake", setup, LISTS, "here").to_json()
    assert change[0] in text
    with pytest.raises(InputError, match=message):
        ServerPlan.from_json(text.replace(*change))
