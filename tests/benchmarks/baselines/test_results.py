"""Ratios, who is compared with whom, the document, and what is drawn and printed of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from baselines import page
from baselines.quality import Quality
from baselines.report_text import text
from baselines.results import Comparison, Series, Trial
from baselines.worker import Contender

from llmc.errors import InputError

HOST = {"cpu": "a <CPU>", "cores": 2, "memory_gib": 4.0}


def quality(kl: float) -> Quality:
    return Quality(100, kl, 5 * kl, 0.95)


def make() -> Comparison:
    """A bundle of 8 bits in blocks; a baseline of its class, a coarser and faster one, and one of 4 bits."""
    found = Comparison("m", HOST, 2, [
        Contender("ours", "llmc", "bundle", "", "", bits=8), Contender("alike", "baseline", "e", "", "", bits=8),
        Contender("slower", "baseline", "e", "", "", bits=8), Contender("coarse", "baseline", "e", "", "", bits=8),
        Contender("four", "baseline", "e", "", "", bits=4),
    ])  # fmt: skip
    found.quality = {
        "ours": quality(0.005), "alike": quality(0.004), "slower": quality(0.0001), "coarse": quality(0.010),
        "four": quality(0.3),
    }  # fmt: skip
    time = Series("decode", "ms")
    rate = Series("served", "tokens/s", "more")
    for name, ms in (
        ("ours", (4, 9, 5)),
        ("alike", (5, 10, 4)),
        ("slower", (9, 9, 9)),
        ("coarse", (1, 1, 1)),
        ("four", (1, 1, 1)),
    ):
        for value in ms:
            time.add(name, float(value))
            rate.add(name, 100.0 / value)
    found.series = [time, rate]
    return found


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    [ratio] = make().ratios(make().series[0])
    assert (ratio.ours, ratio.baseline) == ("ours", "alike")
    assert (ratio.median, ratio.least, ratio.most) == (0.9, 0.8, 1.25)


def test_of_rates_the_best_baseline_has_the_most() -> None:
    [ratio] = make().ratios(make().series[1])
    assert (ratio.baseline, ratio.median) == ("alike", pytest.approx(10 / 9))


def test_a_baseline_further_from_float32_than_the_bundles_class_is_no_baseline() -> None:
    found = make()
    assert found.baselines_of(found.contenders[0]) == ["alike", "slower"]
    found.quality["ours"] = quality(0.011)
    assert found.baselines_of(found.contenders[0]) == ["alike", "slower", "coarse"]


def test_where_no_quality_is_known_bits_decide() -> None:
    found = make()
    found.quality = {}
    assert found.baselines_of(found.contenders[0]) == ["alike", "slower", "coarse"]


def test_a_ratio_says_whether_quality_or_bits_alone_chose_its_baseline() -> None:
    found = make()
    del found.quality["alike"]
    assert [(r.baseline, r.by) for r in found.ratios(found.series[0])] == [("alike", "bits")]
    found.series[0].drop("alike", "it fell over")
    assert [(r.baseline, r.by) for r in found.ratios(found.series[0])] == [("slower", "class")]
    assert [r["by"] for r in found.to_dict()["series"][0]["ratios"]] == ["class"]
    found.quality = {}
    said = text(found)
    assert "quality was not measured, so no class is known" in said and "of its class" not in said


def test_settings_that_were_searched_are_named_with_what_they_were_chosen_from() -> None:
    found = make()
    found.tuning = [
        Trial("alike", "latency", {"batched_tokens": 256}, 0.25),
        Trial("alike", "latency", {"batched_tokens": 512}, 0.125, chosen=True),
        Trial("alike", "latency", {"batched_tokens": 1024}, error="no room"),
    ]
    assert (
        "note: alike for latency: batched_tokens 512 (tried: batched_tokens 256 250 ms, batched_tokens 512 125 ms, "
        "batched_tokens 1024 failed)"
    ) in text(found)


def test_the_document_reads_back(tmp_path: Path) -> None:
    found = make()
    found.series[0].drop("four", "it fell over")
    found.series[0].share("ours", "of the roofline", [0.5, 0.7, 0.6])
    found.notes = ["a note"]
    found.series[0].orders = [["ours", "alike"], ["alike", "ours"]]
    found.tuning = [Trial("alike", "latency", {"batched_tokens": 256}, 0.2, chosen=True)]
    found.unfinished = ["prefill of 512 tokens"]
    found.save(tmp_path / "bench.json")
    read = Comparison.load(tmp_path / "bench.json")
    assert read.to_dict() == found.to_dict()
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["series"][0]["ratios"][0]["median"] == 0.9
    assert document["series"][0]["medians"]["ours"] == 5
    assert "python" not in document["contenders"][0] and "model" not in document["contenders"][0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "not a comparison"), ("{", "not JSON"), ('{"kind": "llmc-comparison", "version": 99}', "of version 1"),
        ('{"kind": "llmc-comparison", "version": 1}', "a damaged comparison"),
    ],
)  # fmt: skip
def test_another_document_is_refused(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(InputError, match=said):
        Comparison.load(tmp_path / "x.json")


def test_losses_are_printed_as_plainly_as_wins() -> None:
    found = make()
    lost = Series("prefill", "ms")
    for _ in range(2):
        lost.add("ours", 3.0)
        lost.add("alike", 1.0)
    found.series.append(lost)
    lines = text(found).splitlines()
    [line] = [line for line in lines if line.startswith("prefill") and "ours" in line and "alike" in line]
    assert line.split()[-2:] == ["3.00–3.00", "LOST"]
    assert any("won, not in every round" in line for line in lines)


def test_what_is_missing_is_printed_with_its_reason() -> None:
    found = make()
    found.series[0].drop("four", "the bundle takes 9 tokens")
    found.notes = ["quality of four was not measured"]
    printed = text(found)
    assert "four: the bundle takes 9 tokens" in printed
    assert "note: quality of four was not measured" in printed


def test_a_page_has_tables_and_plots_and_nothing_from_outside(tmp_path: Path) -> None:
    page.draw(tmp_path / "out.html", [make(), make()], "a <title>", "<p>more</p>")
    content = (tmp_path / "out.html").read_text()
    assert content.count("<svg ") == 2 * 3
    assert "a &lt;CPU&gt;" in content and "a &lt;title&gt;" in content and "<p>more</p>" in content
    for outside in ("<script", "src=", "<link", "@import"):
        assert outside not in content


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    page.draw(tmp_path / "out.png", [make()])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_another_kind_of_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ends in \.png or \.html"):
        page.draw(tmp_path / "out.pdf", [make()])
