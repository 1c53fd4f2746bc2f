"""`llmc generate`: prompts in, texts out, and what is refused."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.bundle.reader import blob_path
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.testing.toy import EOS, tokenizer_json, write_toy
from tests.artifacts.helpers import flip, truncate
from tests.cli.helpers import Llmc, Ran
from tests.damage import spoil
from tests.manifests import edit_manifest
from tests.tiers import default_cases
from tests.toy import greedy

LIMIT = 31
TOKENIZER = Tokenizer(tokenizer_json().encode())


@pytest.fixture
def toy(built: Path) -> Path:
    return built / "toy"


@pytest.fixture
def generate(llmc: Llmc, bundle: Path) -> Llmc:
    """`llmc generate bundle …`, six tokens for each prompt."""

    def run(*arguments: object) -> Ran:
        count = () if "--max-tokens" in arguments else ("--max-tokens", 6)
        return llmc("generate", bundle, *count, *arguments)

    return run


def answer(model: Path, text: str, count: int = 6) -> list[int]:
    """The reference's tokens, up to its end token."""
    (tokens,) = greedy(model, [TOKENIZER.encode(text)], count)
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode([t for t in tokens if t != EOS])


# Answers


def test_a_prompt_is_answered_on_standard_output_and_nothing_else_is_there(generate: Llmc, toy: Path) -> None:
    ran = generate("--prompt", "a river")
    assert (ran.code, ran.out) == (0, text_of(answer(toy, "a river")) + "\n")
    assert ran.err == "compilations while serving: 0\n"
    assert generate("--prompt", "a river", "-q") == (0, ran.out, "")


def test_another_bundle_may_compute_the_prompts(generate: Llmc, llmc: Llmc, toy: Path, here: Path) -> None:
    assert llmc("compile", toy, "--device", "fake:ragged", "--max-model-len", 32, "-o", "other", "-q").code == 0
    ran = generate("--prompt", "a river", "--prefill", "other", "--json")
    said = json.loads(ran.out)
    assert said["token_ids"] == answer(toy, "a river")
    assert said["buckets"][0]["executable"] == "handed over"
    assert said["timings"]["kv_transfer"]["tokens"] == 7 and said["timings"]["kv_transfer"]["bytes"] > 0


def test_several_prompts_are_reported_apart(generate: Llmc, toy: Path) -> None:
    ran = generate("--prompt", "one", "-p", "another one", "--prompt", "x")
    expected = "".join(f"> {p}\n{text_of(answer(toy, p))}\n" for p in ("one", "another one", "x"))
    assert ran.out == expected


def test_json_is_an_object_a_prompt(generate: Llmc, toy: Path) -> None:
    ran = generate("--prompt", "one", "--prompt", "another one", "--json")
    assert ran.err == ""
    assert [found["prompt"] for found in ran.lines] == ["one", "another one"]
    for found in ran.lines:
        tokens = answer(toy, found["prompt"])
        assert found["prompt_token_ids"] == TOKENIZER.encode(found["prompt"])
        assert (found["token_ids"], found["text"]) == (tokens, text_of(tokens))
        assert found["finish_reason"] == ("stop" if EOS in tokens else "length")
        assert 0 < found["timings"]["first_token_s"] <= found["timings"]["total_s"]
        prompt, *decodes = found["buckets"]
        assert (prompt["phase"], prompt["batch"], prompt["query"], prompt["context"]) == ("prompt", 2, 32, 0)
        assert prompt["live_rows"] == 2 and prompt["padding_tokens"] == 64 - 3 - 11
        assert {step["phase"] for step in decodes} == {"decode"} and len(decodes) == len(tokens) - 1
        assert {"executable", "prepare_s", "execute_s", "sample_s"} <= set(prompt)


@pytest.mark.parametrize("extra", [[], ["--temperature", 1, "--seed", 5], ["--stop", "a"]], ids=str)
def test_a_stream_is_the_same_text(generate: Llmc, extra: list[Any]) -> None:
    arguments = ["--prompt", "one", "--prompt", "another é one", "--max-tokens", 12, *extra]
    whole = [found["text"] for found in generate(*arguments, "--json").lines]
    ran = generate(*arguments, "--stream")
    assert ran.code == 0
    assert ran.out == "".join(text + "\n" for text in whole)


def test_buckets_are_shown_as_a_table(generate: Llmc) -> None:
    ran = generate("--prompt", "a river", "--show-buckets", "--ignore-eos")
    _, header, *rows = ran.out.splitlines()
    columns = ["steps", "phase", "batch x query + context", "rows", "padding", "executable"]
    assert [header.find(column) >= 0 for column in columns] == [True] * len(columns)
    assert [row.split()[:2] for row in rows] == [["1", "prompt"], ["2–6", "decode"]]
    assert "1 x 32 + 0" in rows[0] and "25 tokens" in rows[0] and "prompt batch=1 query=32 context=0" in rows[0]
    assert "1 x 1 + 32" in rows[1] and "0 tokens" in rows[1]
    assert all(row.count(" ms") == 3 for row in rows)


def test_a_stream_shows_the_buckets_of_all_prompts(generate: Llmc) -> None:
    ran = generate("--prompt", "one", "--prompt", "two", "--stream", "--show-buckets", "--ignore-eos")
    rows = ran.out.splitlines()[3:]
    assert [row.split()[:2] for row in rows] == [
        ["1", "prompt"],
        ["2–6", "decode"],
        ["7", "prompt"],
        ["8–12", "decode"],
    ]


# Speculation


@pytest.fixture
def ragged(llmc: Llmc, toy: Path) -> Path:
    """A bundle whose executor verifies drafts."""
    limits = ("--max-model-len", 64, "--max-num-seqs", 4)
    assert llmc("compile", toy, "--device", "fake:ragged", *limits, "-o", "ragged", "-q").code == 0
    return Path("ragged")


REPEATS = ("--prompt", "ab" * 12, "--max-tokens", 24, "--ignore-eos", "--repetition-penalty", 0.05)
"""A penalty that rewards what was there."""


def test_speculation_takes_fewer_steps_to_the_same_text(llmc: Llmc, ragged: Path) -> None:
    plain, fast = llmc("generate", ragged, *REPEATS), llmc("generate", ragged, *REPEATS, "--speculate", 4)
    assert (fast.code, fast.out) == (0, plain.out)
    reported = re.fullmatch(
        r"compilations while serving: 0\nspeculation: (\d+) tokens drafted, (\d+) accepted \(\d+%\), (\d+) steps\n",
        fast.err,
    )
    assert reported is not None, fast.err
    drafted, accepted, steps = map(int, reported.groups())
    assert drafted >= accepted > 0 and steps == 24 - accepted
    assert "speculation" not in plain.err


def test_each_step_says_what_was_drafted_and_accepted(llmc: Llmc, ragged: Path) -> None:
    flags = ("--speculate", 4, "--prompt-lookup-max", 2, "--prompt-lookup-min", 1)
    (found,) = llmc("generate", ragged, *REPEATS, *flags, "--json").lines
    steps = found["buckets"]
    assert sum(step["accepted_tokens"] for step in steps) == 24 - len(steps) > 0
    assert all(step["query"] == 1 + step["drafted_tokens"] for step in steps[1:])
    shown = llmc("generate", ragged, *REPEATS, *flags, "--show-buckets").out.splitlines()
    assert shown[1].split()[-1] == "accepted" and all(re.search(r"\d+ of \d+$", row) for row in shown[2:])


def test_speculation_over_graphs_of_fixed_shapes_says_what_to_compile(generate: Llmc) -> None:
    said = generate("--prompt", "a", "--speculate", 2).failed(2)
    assert "graphs have fixed shapes" in said and "compile without --specialise" in said


@pytest.mark.parametrize(("flags", "said"), [
    (("--speculate", 0), "num_speculative_tokens 0 must be a whole number, at least 1"),
    (("--speculate", 99), "num_speculative_tokens 99 is more than 64"),
    (("--prompt-lookup-min", 2), "--prompt-lookup-min has no effect without speculation; add --speculate K"),
    (("--speculate", 4, "--prompt-lookup-min", 5, "--prompt-lookup-max", 2), "prompt_lookup_min 5 is more than"),
])  # fmt: skip
def test_speculation_that_makes_no_sense(generate: Llmc, flags: tuple[Any, ...], said: str) -> None:
    assert said in generate("--prompt", "a", *flags).failed(2)


# Where prompts come from


def written(folder: Path, *lines: object) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


def test_a_file_of_json_lines(generate: Llmc, toy: Path, here: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    ids = [3, 1, 4]
    file = written(here, {"prompt": "a river"}, {"messages": chat, "seed": 1}, "", {"prompt": ids})
    first, second, third = generate("--prompts", file, "--json").lines
    assert (first["prompt"], first["token_ids"]) == ("a river", answer(toy, "a river"))
    assert second["prompt"] == chat
    assert second["prompt_token_ids"] == TOKENIZER.encode("user: hi\nassistant:")
    assert third["prompt"] == third["prompt_token_ids"] == ids
    shown = generate("--prompts", file).out
    assert all(f"> {heading}\n" in shown for heading in ("a river", "hi", ids))


def test_a_file_of_plain_lines(generate: Llmc, here: Path) -> None:
    file = written(here, "a river", "", 'two "quoted" words')
    assert [f["prompt"] for f in generate("--prompts", file, "--json").lines] == ["a river", 'two "quoted" words']


def test_a_line_says_how_it_is_sampled_and_wins_over_the_flags(generate: Llmc, toy: Path, here: Path) -> None:
    whole = text_of(answer(toy, "a river", 12))
    file = written(
        here, {"prompt": "a river", "max_tokens": 2}, {"prompt": "a river", "max_tokens": None},
        {"prompt": "a river", "max_tokens": 12, "stop": whole[3]}, {"prompt": "a river", "temperature": 2.0, "seed": 3},
        {"prompt": "a river", "temperature": 2.0, "seed": 4, "top_k": 1},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "logit_bias": {"64": 100}},
    )  # fmt: skip
    short, plain, stopped, drawn, first, chat = generate("--prompts", file, "--json").lines
    assert short["token_ids"] == answer(toy, "a river", 2) and plain["token_ids"] == answer(toy, "a river")
    assert stopped["text"] == whole[: whole.index(whole[3])] and stopped["finish_reason"] == "stop"
    assert drawn["token_ids"] != plain["token_ids"] == first["token_ids"], "the best token alone is the greedy one"
    assert chat["text"] == "a" and len(chat["token_ids"]) == 1
    again = generate("--prompts", file, "--json", "--temperature", 0.5, "--seed", 9).lines
    assert again[3]["token_ids"] == drawn["token_ids"], "the flags are for lines that say nothing"
    streamed = generate("--prompts", file, "--stream", "-q").out
    assert streamed.startswith(f"{short['text']}\n{plain['text']}\n{stopped['text']}\n")


def test_standard_input(generate: Llmc, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a river\n"))
    assert generate("-").out == text_of(answer(toy, "a river")) + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"prompt": "one"}\n{"prompt": "two"}\n'))
    assert [f["prompt"] for f in generate("-", "--json").lines] == ["one", "two"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert generate("-").failed(2) == "there is no prompt"


def test_chat_wraps_prompts_in_the_models_template(generate: Llmc) -> None:
    (found,) = generate("--chat", "--prompt", "hi", "--json").lines
    assert found["prompt"] == [{"role": "user", "content": "hi"}]
    assert found["prompt_token_ids"] == TOKENIZER.encode("user: hi\nassistant:")


@default_cases(6)
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"}', "{"], "line 2: not JSON"),
        (['{"prompt": "a"}', "[1]"], "line 2: needs either a field prompt or a field messages"),
        (['{"prompt": "a", "messages": []}'], "line 1: needs either a field prompt or a field messages"),
        (
            ['{"prompt": "a"}', "", '{"prompt": "a", "max_token": 5}'],
            "line 3: unknown field 'max_token'; known: prompt,",
        ),
        (['{"prompt": "a", "n": 2}'], "line 1: unknown field 'n'"),
        (['{"prompt": "a", "max_tokens": 0}'], "line 1: max_tokens must be at least 1, not 0"),
        (['{"prompt": "a", "max_tokens": "9"}'], "line 1: max_tokens must be an integer, not '9'"),
        (['{"prompt": "a", "stop": [""]}'], "line 1: stop must hold texts that are not empty"),
        (["[" * 100000], "the prompt has 100000 tokens"),
        (['{"prompt": ' + "[" * 100000], "line 1: not JSON"),
        (['{"text": "a"}'], "line 1: needs either a field prompt or a field messages"),
        (['{"prompt": "a"}', '{"prompt": 5}'], "line 2: prompt must be a text or a list of token ids"),
        (['{"prompt": ["a"]}'], "line 1: prompt must be a text or a list of token ids"),
        (['{"messages": "x"}'], "line 1: messages must be a list"),
        (['{"messages": [{"role": "user"}]}'], "line 1: messages[0] (user) has no content"),
        (['{"prompt": [1, 9999]}'], "prompt token ids must be in 0 … 256, found 9999"),
        (['{"prompt": []}'], "the prompt is empty"),
    ],
)
def test_a_bad_line_is_named(generate: Llmc, here: Path, lines: list[str], message: str) -> None:
    assert message in generate("--prompts", written(here, *lines)).failed(2)


def test_prompts_come_in_one_way(generate: Llmc, here: Path) -> None:
    one_way = "give the prompts in one way: --prompt TEXT, --prompts FILE, or - for standard input"
    assert generate().failed(2) == one_way
    assert generate("--prompt", "x", "-").failed(2) == one_way
    assert generate("--prompt", "x", "--prompts", written(here, "y")).failed(2) == one_way
    assert generate("text").failed(2).startswith("unexpected argument 'text'; give prompts with --prompt")


def test_a_file_that_cannot_be_read(generate: Llmc, here: Path) -> None:
    assert "absent.txt: prompts cannot be read" in generate("--prompts", "absent.txt").failed(2)
    (here / "latin").write_bytes(b"caf\xe9\n")
    assert "latin: prompts cannot be read" in generate("--prompts", "latin").failed(2)
    (here / "empty").touch()
    assert generate("--prompts", "empty").failed(2) == "there is no prompt"


def test_prompts_that_cannot_run_name_the_limit(generate: Llmc) -> None:
    assert generate("--prompt", "").failed(2) == "the prompt is empty: it has no token"
    assert len(generate("--prompt", "x" * LIMIT, "--json").lines[0]["token_ids"]) == 1
    message = generate("--prompt", "x" * (LIMIT + 1)).failed(2)
    assert message.startswith(f"the prompt has {LIMIT + 1} tokens; this bundle takes at most {LIMIT}")
    assert "max_model_len 32" in message


def test_a_model_without_a_chat_template(llmc: Llmc, tmp_path: Path) -> None:
    plain = write_toy(tmp_path / "plain")
    (plain / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    llmc("compile", plain, "--device", "fake", "--max-model-len", 32, "-o", "plain")
    assert "no chat template" in llmc("generate", "plain", "--chat", "--prompt", "hi").failed(2)


def test_a_bundle_without_a_tokenizer_takes_token_ids(llmc: Llmc, tmp_path: Path, here: Path) -> None:
    plain = write_toy(tmp_path / "plain", tokenizer=False, vocab=40)
    llmc("compile", plain, "--device", "fake", "--max-model-len", 32, "-o", "plain")
    assert "no tokenizer in the bundle; pass token ids" in llmc("generate", "plain", "--prompt", "hi").failed(5)
    file = written(here, {"prompt": [1, 2, 3]})
    (found,) = llmc("generate", "plain", "--prompts", file, "--max-tokens", 5, "--json").lines
    assert [found["token_ids"]] == greedy(plain, [[1, 2, 3]], 5)


# How tokens are chosen


def test_a_text_ends_before_a_stop_string(generate: Llmc, toy: Path) -> None:
    whole = generate("--prompt", "a river", "--max-tokens", 20, "--json").lines[0]["text"]
    stops = [whole[9], whole[12:14]]
    (found,) = generate(
        "--prompt", "a river", "--max-tokens", 20, "--stop", stops[1], "--stop", stops[0], "--json"
    ).lines
    end = min(whole.find(stop) for stop in stops)
    assert (found["text"], found["finish_reason"]) == (whole[:end], "stop")


def test_the_end_token_ends_a_text_unless_reported_otherwise(llmc: Llmc, tmp_path: Path) -> None:
    """A toy whose end token is what it answers first."""
    toy = tmp_path / "ending"
    write_toy(toy)
    (first,) = greedy(toy, [TOKENIZER.encode("a river")], 1)[0]
    write_toy(toy, eos_token_id=first)
    llmc("compile", toy, "--device", "fake", "--max-model-len", 32, "-o", "ending")
    arguments = ("generate", "ending", "--prompt", "a river", "--max-tokens", 6, "--json")
    (found,) = llmc(*arguments).lines
    assert (found["token_ids"], found["text"], found["finish_reason"]) == ([first], "", "stop")
    assert len(llmc(*arguments, "--ignore-eos").lines[0]["token_ids"]) == 6


def test_sampling_is_repeatable_with_a_seed_and_varies_without(generate: Llmc) -> None:
    def sampled(*extra: object) -> list[int]:
        flags = ("--prompt", "a river", "--temperature", 2, "--max-tokens", 20, "--ignore-eos", "--json")
        return generate(*flags, *extra).lines[0]["token_ids"]

    assert sampled("--seed", 3) == sampled("--seed", 3) != sampled("--seed", 4)
    assert sampled() != sampled()


@pytest.mark.parametrize("flags", [["--top-k", 1], ["--top-p", 1e-9], ["--min-p", 1.0], ["--temperature", 0]], ids=str)
def test_choosing_among_one_token_is_greedy(generate: Llmc, toy: Path, flags: list[Any]) -> None:
    sampled = ["--temperature", 1.5, *flags, "--ignore-eos", "--json"]
    (found,) = generate("--prompt", "a river", *sampled).lines
    assert found["token_ids"] == greedy(toy, [TOKENIZER.encode("a river")], 6)[0]


def test_a_repetition_penalty_keeps_tokens_from_coming_back(generate: Llmc) -> None:
    flags = ("--prompt", "aaaa", "--max-tokens", 25, "--ignore-eos", "--json", "--repetition-penalty")
    plain, penalised = (generate(*flags, r).lines[0]["token_ids"] for r in (1.0, 1e6))
    assert len(set(plain)) < len(plain)
    assert len(set(penalised)) == len(penalised)


@default_cases(4)
@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--max-tokens", 0, "max_tokens must be at least 1, not 0"),
        ("--temperature", -1, "temperature must be at least 0, not -1.0"),
        ("--top-p", 0, "top_p"),
        ("--top-p", 1.5, "top_p"),
        ("--top-k", -2, "top_k must be at least -1, not -2"),
        ("--min-p", 2, "min_p"),
        ("--repetition-penalty", 0, "repetition_penalty"),
        ("--stop", "", "stop must hold texts that are not empty"),
        ("--threads", 0, "--threads 0 must be at least 1"),
        ("--threads", -1, "--threads -1 must be at least 1"),
    ],
)
def test_numbers_that_make_no_sense_are_usage_errors(generate: Llmc, flag: str, value: object, message: str) -> None:
    assert message in generate("--prompt", "x", flag, value).failed(2)


# Bundles that cannot be trusted


def test_what_is_no_bundle(llmc: Llmc, toy: Path, tmp_path: Path) -> None:
    assert (
        llmc("generate", "nowhere", "--prompt", "x").failed(5).startswith("nowhere: no such file or folder; MODEL is")
    )
    (tmp_path / "empty").mkdir()
    said = llmc("generate", tmp_path / "empty", "--prompt", "x").failed(5)
    assert said.endswith("not a bundle (no manifest.json in it); make one with `llmc compile`")
    damaged = shutil.copytree(toy, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"")
    assert "the file is empty" in llmc("generate", damaged, "--prompt", "x", "--device", "fake", "-q").failed(1)


def test_a_checkpoint_is_compiled_once_as_by_llmc_run(llmc: Llmc, toy: Path) -> None:
    requested = ("--max-tokens", 4, "--device", "fake")
    first = llmc("generate", toy, "--prompt", "ab", *requested)
    assert first.code == 0 and "from the store" not in first.err
    assert llmc("run", toy, "--raw", "ab", *requested).out == first.out
    again = llmc("generate", toy, "--prompt", "ab", *requested)
    *reported, served = again.err.splitlines()
    assert again.out == first.out and "compilations while serving: 0" in served
    assert reported and all(line.endswith(("cached", "from the store")) for line in reported)
    several = llmc("generate", toy, "--prompt", "ab", "--prompt", "ba", *requested, "--show-buckets")
    assert "decode  2 x 1 + " in several.out and first.out in several.out


@pytest.mark.parametrize("name", ["weights", "tokenizer.json", "prompt", "decode"])
@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_damage_is_reported_with_the_file_and_the_way_out(
    generate: Llmc, bundle: Path, name: str, damage: Callable[[Path], None]
) -> None:
    manifest = read_manifest(bundle)
    graphs = {e.phase: e.blob for e in manifest.executables if e.batch == 1}
    digest = graphs.get(name) or manifest.files[name]
    damage(blob_path(bundle, digest))
    message = generate("--prompt", "x").failed(5)
    assert digest in message and str(bundle) in message
    assert f"llmc compile MODEL --device fake -o {bundle}" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(schema=99), "schema 99 is newer"),
        (lambda m: m.update(executor="vulkan"), "unknown executor 'vulkan'; known: hpu, "),
        (lambda m: m["toolchain"].update(fake="9"), "compiled with the fake device 9, this host has 1.0"),
        (lambda m: m.update(executables=[]), "no executable for prompt batch 1"),
        (lambda m: m.update(plan={}), "plan"),
    ],
)
def test_a_manifest_that_does_not_fit_this_host_says_why(
    generate: Llmc, bundle: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    edit_manifest(bundle, change)
    assert words in generate("--prompt", "x").failed(5)


# Damage


@pytest.mark.parametrize("how", [(), ("--stream",)])
def test_logits_that_are_no_numbers_end_one_text_and_the_command_in_an_error(
    generate: Llmc, toy: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...]
) -> None:
    spoil(monkeypatch, TOKENIZER.encode("~")[0])
    ran = generate("--prompt", "a~b", "--prompt", "a river", *how)
    assert ran.code == 4
    assert text_of(answer(toy, "a river")) in ran.out, "the other text is there"
    assert "1 of 2 texts ended early: the logits contain NaN or infinity" in ran.err
    assert "run: llmc verify" in ran.err
