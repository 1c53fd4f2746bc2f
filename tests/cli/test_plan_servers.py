"""Plans for other servers, as typed: from traffic to a configuration, and back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import Llmc
from tests.tiers import full

SAMPLE = Path(__file__).parents[1] / "data" / "azure_conv_sample.csv"
VLLM = ("--server", "vllm", "--max-model-len", 8192, "--max-num-seqs", 64, "--max-num-batched-tokens", 2048)
TRAFFIC = ("--traffic", SAMPLE)


def test_tune_writes_a_configuration_that_all_padding_less_with_fewer_graphs(llmc: Llmc) -> None:
    found = llmc("plan", "tune", *VLLM, *TRAFFIC, "--max-graphs", 20, "-o", "conf", "--save", "p.json", "--json").json
    own, tuned = (found["configurations"][name] for name in ("the server's own", "tuned"))
    assert tuned["graphs"] <= 20 < own["graphs"]
    assert tuned["padding"]["tokens"] < own["padding"]["tokens"]
    assert sorted(entry.name for entry in Path("conf").iterdir()) == [
        "arguments", "config.yaml", "environment", "kubernetes-env.yaml", "report.html",
    ]  # fmt: skip
    sizes = json.dumps({"cudagraph_capture_sizes": [n for (n,) in found["plan"]["lists"]["tokens"]]})
    assert f"--compilation-config '{sizes[:-1]}" in Path("conf/arguments").read_text()
    page = Path("conf/report.html").read_text()
    assert "<svg" in page and "cudagraph_capture_sizes" in page and "http-equiv" in page
    origin = ["llmc 0", "azure_conv_sample.csv: 1,500 requests, 2023-11-16 18:15:46 to 2023-11-16 18:"]
    for entry in Path("conf").iterdir():
        text = entry.read_text()
        assert all(line in text for line in origin), entry
        assert "llmc plan tune --server vllm" in text and str(SAMPLE.parent) not in text and str(Path.cwd()) not in text
    assert list(found["other_traffic"]) == [
        "the second half (held out)", "lengths × 0.5", "lengths × 2", "arrivals × 2", "uniform steps",
    ]  # fmt: skip
    assert all(title in page for title in found["other_traffic"]) and "Terms" in page
    assert 0 <= found["hedge"]["price"]["tokens"] <= 0.02
    judged = llmc("plan", "evaluate", "conf", "p.json", "--default", "--server", "vllm", *TRAFFIC, "--json").json
    assert {name: one["padding"] for name, one in judged["configurations"].items()} == {
        "the server's own": own["padding"], "conf": tuned["padding"], "p.json": tuned["padding"],
    }  # fmt: skip


@full
def test_a_setting_is_spelled_as_in_python_or_as_a_flag(llmc: Llmc) -> None:
    for name in ("num_speculative_tokens", "num-speculative-tokens", "--num-speculative-tokens"):
        found = llmc("plan", "tune", *VLLM, *TRAFFIC, "--set", f"{name}=2", "--json").json
        assert found["plan"]["settings"]["num_speculative_tokens"] == 2


def test_the_settings_of_a_server_are_listed(llmc: Llmc) -> None:
    ran = llmc("plan", "tune", "--server", "vllm", "--set", "?")
    assert ran.code == 0 and ran.out.startswith("--set NAME ") and not ran.err
    assert "\nperformance_mode            --performance-mode " in ran.out


def test_a_value_that_looks_wrong_is_explained_where_it_stands(llmc: Llmc) -> None:
    llmc("plan", "tune", "--server", "tpu-inference", *VLLM[2:], *TRAFFIC, "-o", "tpu")
    assert "\n# MIN_TOKEN_BUCKET is large on purpose: " in Path("tpu/environment").read_text()


def test_tune_says_what_to_paste_and_judges_on_other_traffic(llmc: Llmc) -> None:
    ran = llmc("plan", "tune", *VLLM, *TRAFFIC, "--judge", SAMPLE)
    assert ran.code == 0
    assert "# arguments\n--max-model-len 8192\n" in ran.out and "# config.yaml\nmax-model-len: 8192\n" in ran.out
    assert f"\n{SAMPLE.name} " in ran.out and "\nlengths × 2 " in ran.out


@full
def test_a_hedge_is_a_share(llmc: Llmc) -> None:
    alone = llmc("plan", "tune", *VLLM, *TRAFFIC, "--hedge", "0", "--json").json
    hedged = llmc("plan", "tune", *VLLM, *TRAFFIC, "--hedge", "30%", "--json").json
    assert alone["hedge"]["price"] == {"tokens": 0} and hedged["hedge"]["price"]["tokens"] > 0
    pad = [one["other_traffic"]["uniform steps"]["tuned"]["padding"]["tokens"] for one in (alone, hedged)]
    assert pad[1] < pad[0]
    assert "a share from 0 to below 1, not 1" in llmc("plan", "tune", *VLLM, *TRAFFIC, "--hedge", "1").failed(2)


def test_a_plan_goes_out_and_comes_back(llmc: Llmc) -> None:
    llmc("plan", "--max-model-len", 8192, "--max-num-seqs", 64, "--max-num-batched-tokens", 2048, "-o", "plan.json")
    exported = llmc("plan", "export", "plan.json", "--server", "vllm", "--json").json
    Path("command").write_text("vllm serve m \\\n" + " \\\n".join(
        f"{flag} '{value}'" for flag, _, value in (text.partition(" ") for text in exported["arguments"])
    ))  # fmt: skip
    found = llmc("plan", "import", "command", "--server", "vllm").json
    assert found["lists"]["tokens"] == [
        [n] for n in json.loads(exported["arguments"][-1].partition(" ")[2])["cudagraph_capture_sizes"]
    ]
    llmc("plan", "import", "command", "--server", "vllm", "-o", "back.json")
    assert json.loads(Path("back.json").read_text()) == found


def test_a_plan_that_is_built_is_printed_in_a_servers_form(llmc: Llmc) -> None:
    built = ("plan", "--max-model-len", 2048, "--max-num-seqs", 8, "--block-size", 128, "--server", "vllm-gaudi")
    ran = llmc(*built, "--max-num-batched-tokens", 2048)
    assert ran.code == 0 and "# arguments\n--max-model-len 2048\n--max-num-seqs 8\n" in ran.out
    assert "# buckets.txt\n" in ran.out
    found = llmc(*built, "--max-num-batched-tokens", 2048, "--json").json
    assert found["plan"]["limits"]["max_num_seqs"] == 8 and "buckets.txt" in found["files"]
    assert "unknown server 'x'; known: " in llmc(*built[:-1], "x").failed(2)


def test_a_list_that_leaves_steps_to_be_compiled_in_traffic_is_refused_with_them(llmc: Llmc) -> None:
    gaudi = ("--server", "vllm-gaudi", *VLLM[2:])
    Path("buckets.txt").write_text("(1, [128, 2048], 0)\n(64, 1, [64, 4096])\n")
    said = llmc("plan", "export", "buckets.txt", *gaudi, *TRAFFIC).failed(2)
    assert said.startswith("buckets.txt leaves steps of ") and "prompt 1x" in said and said.endswith("for this traffic")
    assert llmc("plan", "export", "buckets.txt", *gaudi).code == 0


@full
def test_another_package_brings_a_server(tmp_path: Path) -> None:
    package = tmp_path / "packages"
    (package / "mine-1.0.dist-info").mkdir(parents=True)
    (package / "llmc_mine.py").write_text(
        "from llmc.integrations.base import Integration\nfrom llmc.integrations.vllm.buckets import Vllm\n\n"
        "INTEGRATION = Integration(buckets='llmc_mine:Mine')\n\n\n"
        "class Mine(Vllm):\n    name = 'mine'\n    title = 'Mine'\n"
    )
    (package / "mine-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (package / "mine-1.0.dist-info" / "entry_points.txt").write_text(
        "[llmc.integrations]\nmine = llmc_mine:INTEGRATION\n"
    )
    arguments = [str(word) for word in ("plan", "tune", "--server", "mine", *VLLM[2:], *TRAFFIC, "--json")]
    ran = subprocess.run(
        [sys.executable, "-m", "llmc", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(package), *sys.path])}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["plan"]["server"] == "mine"


def test_the_log_of_a_start_is_imported(llmc: Llmc) -> None:
    Path("server.log").write_text("INFO x\nINFO config {'cudagraph_capture_sizes': [8, 4, 1]}\n")
    assert llmc("plan", "import", "server.log", *VLLM).json["lists"] == {"tokens": [[1], [4], [8]]}


@pytest.mark.parametrize("server", ["vllm", "sglang", "vllm-gaudi", "tensorrt-llm"])
def test_what_says_nothing_of_a_server_is_not_taken_for_its_own_list(llmc: Llmc, server: str) -> None:
    Path("server.log").write_text("INFO starting\nINFO ready\n")
    assert "server.log: " in llmc("plan", "import", "server.log", "--server", server, "--max-model-len", 8192).failed(2)


def test_check_ends_with_4_where_traffic_has_drifted(llmc: Llmc) -> None:
    Path("command").write_text("--compilation-config '{\"cudagraph_capture_sizes\": [128]}'")
    ran = llmc("plan", "check", "command", *VLLM, *TRAFFIC, "--fail-above", "15%")
    assert ran.code == 4 and "above the limit: padding" in ran.out and "planned anew" in ran.out
    assert llmc("plan", "check", "command", *VLLM, *TRAFFIC, "--fail-above", "99999%").code == 0
    Path("command").write_text("--compilation-config '{\"cudagraph_capture_sizes\": [1]}'")
    ran = llmc("plan", "check", "command", *VLLM, *TRAFFIC, "--fail-above", "15%", "--json")
    assert ran.code == 4 and json.loads(ran.out)["now"]["missing"] > 0.15


def test_configurations_of_different_settings_are_judged_each_on_its_own_steps(llmc: Llmc) -> None:
    Path("both").write_text("--cudagraph-capture-sizes 16 64")
    Path("decode").write_text("vllm serve m -cc.cudagraph_capture_sizes [16,64] -O.cudagraph_mode=FULL_DECODE_ONLY")
    ran = llmc("plan", "evaluate", "both", "decode", *VLLM, *TRAFFIC, "--json", "--plot", "p.html").json
    alone = llmc("plan", "evaluate", "decode", *VLLM, *TRAFFIC, "--json").json
    assert ran["configurations"]["decode"] == alone["configurations"]["decode"]
    assert ran["configurations"]["both"]["missing"] > 0 == alone["configurations"]["decode"]["missing"]
    assert ran["other_traffic"]["lengths × 2"].keys() == {"both", "decode"}
    assert list(ran["other_traffic"])[:2] == ["the first half", "the second half"]
    assert "cudagraph_mode" not in Path("p.html").read_text()
    Path("other").write_text("--max-num-seqs 8 --cudagraph-capture-sizes 8")
    arguments = ("--server", "vllm", "--max-model-len", 8192, *TRAFFIC)
    assert "have different limits" in llmc("plan", "evaluate", "both", "other", *arguments).failed(2)


def test_the_longest_prompt_is_a_limit_of_its_own(llmc: Llmc) -> None:
    npu = ("--server", "openvino-genai", "--max-model-len", 4096, "--max-prompt-len", 2048)
    found = llmc("plan", "tune", *npu, *TRAFFIC, "-o", "conf", "--json").json
    assert found["plan"]["lists"] == {"prompt": [[2048]], "cache": [[4096]]}
    assert json.loads(Path("conf/config.json").read_text())["MAX_PROMPT_LEN"] == 2048


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", *TRAFFIC], "name the server with --server NAME: "),
        (["tune", "--server", "absent"], "unknown server 'absent'; known: "),
        (["tune", "--server", "vllm", *TRAFFIC], "vllm needs max_model_len"),
        (["tune", *VLLM], "name the recorded requests with --traffic FILE"),
        (["tune", "--server", "tpu-inference", *VLLM[2:], *TRAFFIC, "--max-warmup", "1h"], "give --graph-seconds"),
        (["tune", *VLLM, *TRAFFIC, "--set", "x=1"], "unknown setting of vllm 'x'; known: blackwell, "),
        (["tune", *VLLM, *TRAFFIC, "--set", "cudagraph_mod=NONE"], "did you mean 'cudagraph_mode'?"),
        (["tune", *VLLM, *TRAFFIC, "--set", "blackwell"], "--set blackwell has no value; write --set blackwell=VALUE"),
        (["tune", "--server", "sglang@0.5.9"], "llmc has the rules of only one release of sglang"),
        (["tune", "--server", "absent@1"], "unknown server 'absent'; known: "),
        (["tune", "--server", "vllm@new", *VLLM[2:], *TRAFFIC], "vllm: 'new' is not a release"),
        (["tune", *VLLM, *TRAFFIC, "--set", "cudagraph_mode=ALL"], "unknown cudagraph mode 'ALL'"),
        (["evaluate", *VLLM, *TRAFFIC], "name the configurations to judge, or add --default"),
        (["evaluate", "c", *VLLM, *TRAFFIC, "--plot", "p.png"], "ends in .html"),
        (["export", "absent", *VLLM], "cannot read the configuration absent"),
        (["import", "c.json", *VLLM], "c.json says max_num_seqs 8, but 64 was given"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(llmc: Llmc, arguments: list[object], message: str) -> None:
    Path("c.json").write_text('{"schema": 1, "server": "vllm", "limits": {"max_model_len": 8192, "max_num_seqs": 8, '
                              '"max_num_batched_tokens": 2048, "block_size": 16}, "settings": {}, "lists": {"tokens": '
                              '[[8]]}, "origin": "o", "facts": {}}')  # fmt: skip
    assert message in llmc("plan", *arguments).failed(2)


@pytest.mark.parametrize("verb", ["show", "evaluate", "export", "import", "tune", "check"])
def test_every_verb_has_help_with_an_example(llmc: Llmc, verb: str) -> None:
    assert f"llmc plan {verb} " in llmc("plan", verb, "--help").out.partition("Example:")[2]
