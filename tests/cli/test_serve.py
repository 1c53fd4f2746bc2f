"""`llmc serve`: what its flags ask of the server, and what it tells a person."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmc.cli import output
from llmc.cli.serve import _Reported
from llmc.platforms import install_line
from llmc.runtime.engine.speculation import SpeculativeConfig
from llmc.runtime.startup.opening import EngineOptions
from llmc.runtime.text.chat_format import CallNotation, ChatFormat
from llmc.server.events import Dead, Draining, Listening, Ready, Stopped
from llmc.server.state import Progress, ServerConfig
from tests.artifacts.helpers import child
from tests.cli.helpers import Llmc


class Requested:
    """In place of the server: keeps what it was asked for."""

    code = 0

    def __call__(self, config: ServerConfig, open_bundle: Any, **more: Any) -> int:
        self.config, self.open_bundle, self.more = config, open_bundle, more
        return self.code


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> Requested:
    served = Requested()
    monkeypatch.setattr("llmc.server.serve.serve", served)
    return served


def test_without_flags_it_listens_here_only_and_requests_no_key(llmc: Llmc, requested: Requested) -> None:
    assert llmc("serve", "bundle").code == 0
    assert requested.config == ServerConfig()
    assert requested.more["options"] == EngineOptions()
    assert (requested.more["uds"], requested.more["access_log"]) == (None, False)


def test_every_flag_reaches_the_server(llmc: Llmc, requested: Requested) -> None:
    flags = (
        "--host", "0.0.0.0", "--port", 0, "--api-key", "a", "--api-key", "b", "--max-queued-requests", 7,
        "--shutdown-timeout", "2m", "--record-traffic", "t.jsonl", "--otlp-traces-endpoint", "http://otel:4318",
        "--served-model-name", "m",
        "--max-body-size", "1MiB", "--threads", 3, "--prefill-budget", 64, "--prefix-slots", 0, "--uds", "s",
        "--access-log", "--max-connections", 9, "--max-connections-per-client", 8, "--max-requests-per-client", 0,
    )  # fmt: skip
    assert llmc("serve", "bundle", *flags).code == 0
    assert requested.config == ServerConfig(
        "0.0.0.0", 0, ("a", "b"), 7, 120.0, 1 << 20, "m", Path("t.jsonl"), "http://otel:4318", 9, 8, 0
    )
    assert requested.more["options"] == EngineOptions(threads=3, prefill_budget=64, prefix_slots=0)
    assert (requested.more["uds"], requested.more["access_log"]) == (Path("s"), True)


def test_what_browsers_and_models_need_reaches_the_server(llmc: Llmc, requested: Requested, here: Path) -> None:
    form = ChatFormat(thinking=("<think>", "</think>"), calls=CallNotation("named", start="[CALL]"))
    (here / "form.json").write_text(json.dumps(form.to_dict()))
    flags = (
        "--allowed-origins", "https://a.example", "--allowed-origins", '["http://localhost:3000", "*"]',
        "--generation-config", "none", "--chat-format", "form.json", "--ssl-certfile", "c.pem",
        "--ssl-keyfile", "k.pem",
    )  # fmt: skip
    assert llmc("serve", "bundle", *flags).code == 0
    assert requested.config == ServerConfig(
        allowed_origins=("https://a.example", "http://localhost:3000", "*"), generation_config=False, chat_format=form,
        ssl_certfile=Path("c.pem"), ssl_keyfile=Path("k.pem"),
    )  # fmt: skip


@pytest.mark.parametrize("flags", [
    ("--speculate", 5, "--prompt-lookup-max", 3, "--prompt-lookup-min", 1),
    ("--speculative-config",
     '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'),
])  # fmt: skip
def test_speculation_is_requested_by_flags_or_as_vllm_spells_it(
    llmc: Llmc, requested: Requested, flags: tuple[Any, ...]
) -> None:
    assert llmc("serve", "bundle", *flags).code == 0
    assert requested.more["options"] == EngineOptions(speculative_config=SpeculativeConfig(5, 3, 1))


@pytest.mark.parametrize(("flags", "said"), [
    (("--speculate", 0), "num_speculative_tokens 0 must be a whole number, at least 1"),
    (("--prompt-lookup-max", 3), "--prompt-lookup-max has no effect without speculation; add --speculate K"),
    (("--speculative-config", "{}", "--speculate", 3), "--speculative-config replaces --speculate; leave it out"),
    (("--speculative-config", "{}"), "speculative_config needs num_speculative_tokens"),
    (("--speculative-config", "eagle"), "--speculative-config 'eagle' is not JSON"),
])  # fmt: skip
def test_speculation_that_makes_no_sense_is_refused_before_anything_is_opened(
    llmc: Llmc, requested: Requested, flags: tuple[Any, ...], said: str
) -> None:
    assert said in llmc("serve", "bundle", *flags).failed(2)
    assert not hasattr(requested, "config")


def test_the_exit_code_is_the_servers(llmc: Llmc, requested: Requested) -> None:
    requested.code = 143
    assert llmc("serve", "bundle").code == 143


def test_warming_up_is_requested_by_flag_or_as_others_spell_it(
    llmc: Llmc, requested: Requested, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warm_up(*flags: str) -> str:
        assert llmc("serve", "bundle", *flags).code == 0
        return str(requested.more["warm_up"].how)

    assert (warm_up(), warm_up("--warm-up", "open")) == ("all", "open")
    monkeypatch.setenv("VLLM_SKIP_WARMUP", "true")
    assert (warm_up(), warm_up("--warm-up", "all")) == ("open", "all")
    assert llmc("serve", "bundle", "--warm-up", "some").failed(2) == "unknown warm-up 'some'; known: all, aside, open"


def test_a_device_that_captures_graphs_is_reported_how_to_divide_its_memory(
    llmc: Llmc, requested: Requested, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_GRAPH_RESERVED_MEM", "0.4")
    assert llmc("serve", "bundle", "--graph-prompt-ratio", "50%").code == 0
    choice = requested.more["warm_up"].capture
    assert choice.flags == ("--graph-prompt-ratio",)
    assert (choice.options.graph_reserved_mem, choice.options.graph_prompt_ratio) == (0.4, 0.5)


# Keys


def test_the_key_comes_from_the_environment_unless_flags_give_keys(
    llmc: Llmc, requested: Requested, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_API_KEY", "from the environment")
    llmc("serve", "bundle")
    assert requested.config.api_keys == ("from the environment",)
    llmc("serve", "bundle", "--api-key", "flag")
    assert requested.config.api_keys == ("flag",)


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_refused_rather_than_no_key_requested(llmc: Llmc, requested: Requested, key: str) -> None:
    message = llmc("serve", "bundle", "--api-key", key).failed(2)
    assert message.startswith("--api-key is empty; leave it out to require none")
    assert not hasattr(requested, "config")


# What is served


def test_a_bundle_is_opened_as_it_is(llmc: Llmc, requested: Requested, bundle: Path) -> None:
    llmc("serve", bundle)
    assert requested.open_bundle(lambda _: None) == bundle


def test_a_checkpoint_is_compiled_with_the_flags_and_reports_how_far_it_is(
    llmc: Llmc, requested: Requested, toy: Path
) -> None:
    from llmc.runtime.bundle import Bundle

    limits = ("--max-model-len", 32, "--max-num-seqs", 2)
    assert llmc("serve", toy, "--device", "fake", *limits, "--quantize", "none", "--dtype", "f32").code == 0
    reported: list[Progress] = []
    built = Bundle.open(requested.open_bundle(reported.append))
    assert (built.plan.limits.max_model_len, built.plan.limits.max_num_seqs) == (32, 2)
    assert built.manifest.device == "fake"
    stages = [p.stage for p in reported]
    assert stages[-1] == "verify" and {"weights", "compile", "verify"} <= set(stages)
    parts = [p for p in reported if p.stage == "compile"]
    assert parts[0].eta_s is None and all(p.eta_s is not None and p.eta_s >= 0 for p in parts[1:])
    assert parts[-1].eta_s in (None, 0)
    assert requested.more["cache_counters"]()["misses"] > 0, "the compile's own look-ups"
    last = [p for p in reported if p.stage == "compile"][-1]
    assert last.done == last.total > 0


def test_a_plan_has_the_limits_already(llmc: Llmc, requested: Requested, toy: Path, here: Path) -> None:
    from llmc.runtime.bundle import Bundle

    assert llmc("plan", toy, "--max-model-len", 16, "--max-num-seqs", 2, "-o", "plan.json").code == 0
    message = llmc("serve", toy, "--plan", "plan.json", "--max-num-seqs", 4).failed(2)
    assert message == "--plan already defines the limits; leave out --max-num-seqs"
    assert llmc("serve", toy, "--device", "fake", "--plan", "plan.json").code == 0
    assert Bundle.open(requested.open_bundle(lambda _: None)).plan.limits.max_model_len == 16


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--shutdown-timeout", "soon"), "--shutdown-timeout 'soon' is not a time"),
        (("--max-body-size", "big"), "--max-body-size 'big' is not a size"),
        (("--plan", "nowhere.json"), "nowhere.json"),
        (("--allowed-origins", "chat.example"), "--allowed-origins chat.example: an origin is * or as https://"),
        (("--allowed-origins", "[5]"), "--allowed-origins [5]: an origin is"),
        (("--allowed-origins", "https://a/b"), "without a path"),
        (("--generation-config", "some"), "--generation-config 'some'"),
        (("--chat-format", "nowhere.json"), "--chat-format nowhere.json: No such file"),
        (("--chat-format", "odd.json"), "--chat-format odd.json: not a chat format"),
        (("--chat-format", "lacking.json"), "--chat-format lacking.json: a notation of tool calls lacks marks"),
    ],
)
def test_values_that_cannot_be_used_are_named(
    llmc: Llmc, requested: Requested, flags: tuple[str, ...], words: str, here: Path
) -> None:
    (here / "odd.json").write_text("[]")
    (here / "lacking.json").write_text('{"calls": {"kind": "tags"}}')
    assert words in llmc("serve", "bundle", *flags).failed(2)


def test_without_the_extra_it_says_what_to_install() -> None:
    code = """
        import sys
        sys.modules["uvicorn"] = None
        from llmc.cli.main import main
        print(main(["serve", "bundle"]))
    """
    process = child(code)
    out, err = process.communicate(timeout=60)
    assert out == "2\n"
    assert err == f"llmc: error: llmc serve needs uvicorn, which is not installed: {install_line('serve')}\n"


# What it tells a person


def test_it_reports_what_happens_in_lines(capfd: pytest.CaptureFixture[str]) -> None:
    reported = _Reported()
    for event in (
        Listening("http://0.0.0.0:8000", True), Progress("warm up", 1, 2, 3.0), Ready("toy", "fake", 1.25, 11, 0),
        Draining("SIGTERM", 2, 1, 30.0), Dead("RuntimeError: lost"), Stopped(1, 30.0),
    ):  # fmt: skip
        reported(event)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "llmc: listening on http://0.0.0.0:8000",
        "llmc: no API key is required, and other hosts can connect; --api-key sets one",
        "llmc: ready in 1.2 s: toy on fake; 11 warm-up steps run, compilations 0",
        "llmc: SIGTERM: no new requests; 2 running and 1 waiting have 30 s to end (signal again to stop now)",
        "llmc: the engine stopped, and /health is now 503: RuntimeError: lost",
        "llmc: stopped after 30.0 s, 1 request cut",
    ]


def test_long_loading_is_reported_now_and_then(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Reported, "EVERY_S", 0.0)
    reported = _Reported()
    reported(Progress("open"))
    reported(Progress("warm up", 3, 72, 12.4))
    assert capfd.readouterr().err == "llmc: warm up: 3 of 72, about 12 s left\n"


def test_quiet_is_quiet(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "quiet", True)
    _Reported()(Listening("http://127.0.0.1:1"))
    assert capfd.readouterr() == ("", "")
