"""SmolLM2-135M-Instruct as the demo package carries it: the numbers that a user will see."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import llmc
from llmc.artifacts.bundle.manifest import Manifest
from llmc.artifacts.store.store import Store
from llmc.buckets.plan import Plan
from llmc.compiler.checkpoint import demo_path, open_checkpoint
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import dry_run
from llmc.compiler.pipeline.resolve import CompileJob
from llmc.compiler.stages import Stages
from llmc.compiler.verification.transformers_reference import TransformersReference
from llmc.compiler.verification.verify import kl_divergence
from llmc.cpus import usable_cpus
from llmc.errors import CheckpointError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.requests import Request
from llmc.runtime.executors import open_executor
from llmc.runtime.llm import BundleLLM
from llmc.runtime.startup.opening import EngineOptions
from llmc.runtime.step import exact
from llmc.server.events import Ready, Retired, SwapRefused
from tests.server.live import Live
from tests.server.process import Process
from tests.tiers import full
from tests.timing import until

pytestmark = pytest.mark.real_weights

DEMO = "smollm2-demo"
PRODUCED, SHORT = 64, 24
TIE = 2e-3
"""Margin of the reference's two best logits within which either token is right: sums differ in their last digits."""
THREADS = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
"""This process's share of the CPUs: threads that wait for one that shares its CPU with other tests only burn theirs."""
GREEDY = llmc.SamplingParams(max_tokens=PRODUCED, temperature=0, ignore_eos=True)

PROMPTS: list[Any] = [
    "The capital of France is",
    "Once",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "import json\n\nwith open('orders.json') as f:\n    orders = json.load(f)\n\ntotal = sum(",
    "SELECT customer, SUM(amount)\nFROM invoices\nWHERE year = 2021\nGROUP BY",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "3.14159265358979 is close to pi, and 2.71828182845905 is close to",
    "17 + 25 = 42\n31 + 11 = 42\n12 + 30 =",
    "La capitale de l'Italie est Rome, et celle de l'Espagne est",
    "Der Fluss fließt durch die alte Stadt und",
    "El panadero abre su tienda a las seis de la mañana porque",
    "水は百度で",
    "Привет, меня зовут",
    "Step 1: Boil the water.\nStep 2: Add the tea leaves.\nStep 3:",
    "| City | Country |\n|---|---|\n| Lima | Peru |\n| Oslo |",
    "The ferry left at dawn. Nobody on the pier spoke, and the gulls, which had followed every boat that summer, "
    "stayed on their posts as if they knew that this one would not come back. My grandmother counted the passengers "
    "under her breath, as she did every morning, and wrote the number on the wall of the ticket office with a piece "
    "of chalk. Forty-one. The day before it had been forty. She looked at me and said:",
    "To be, or not to be, that is the",
    {"messages": [{"role": "user", "content": "Name three rivers in South America."}]},
    {
        "messages": [
            {"role": "system", "content": "You are a terse assistant."},
            {"role": "user", "content": "What is 9 times 7?"},
            {"role": "assistant", "content": "63."},
            {"role": "user", "content": "And 9 times 8?"},
        ]
    },
    {"messages": [{"role": "user", "content": "Write a haiku about a mountain in winter 🏔️."}]},
]

TEXTS = (
    "Salt was once worth its weight in silver on the caravan routes that crossed the desert. Slabs cut from the dry "
    "lake were tied to camels, four to an animal, and carried for sixteen days to the river markets. A slab that broke "
    "on the way lost half its price, so the drivers slept beside their loads and turned them every night.",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        "
    "self.items.append(item)\n\n    def pop(self):\n        if not self.items:\n            raise IndexError('empty "
    "stack')\n        return self.items.pop()\n\n    def __len__(self):\n        return len(self.items)\n",
    "Q: A train travels 60 kilometres in 45 minutes. What is its average speed in kilometres per hour?\nA: 45 minutes "
    "is three quarters of an hour, so the speed is 60 divided by 0.75, which is 80 kilometres per hour.\n\nQ: And how "
    "long does it take for 200 kilometres?\nA: 200 divided by 80 is 2.5, so it takes two and a half hours.",
    "<|im_start|>user\nMy tomato plants have yellow leaves. What should I do?<|im_end|>\n<|im_start|>assistant\nYellow "
    "leaves often mean too much water or too little nitrogen. Let the soil dry between waterings, remove the lowest "
    "leaves, and feed the plants every two weeks while they carry fruit.<|im_end|>\n",
    "Les premiers imprimeurs voyageaient avec leurs caractères de plomb. In 1473 one of them set up his press in a "
    "mill, paid the rent with almanacs, and left again before the tax collector had learned to read them. Of his "
    "300 copies, 7 survive; the best is bound in calfskin.",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One artifact store for this file, where the environment says, and the threads that the file may use."""
    folder = tmp_path_factory.mktemp("real")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMC_THREADS", str(THREADS))
        patch.setenv("LLMC_CACHE_DIR", str(folder / "cache"))
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return llmc.plan(DEMO, max_model_len=256, max_num_seqs=8)


@pytest.fixture(scope="module")
def exact_bundle(cache: Path, plan: Plan) -> Path:
    llmc.compile(DEMO, cache / "f32", plan=plan, quantize="none", verify="none", device="onnxruntime")
    return cache / "f32"


@pytest.fixture(scope="module")
def int8_bundle(cache: Path, plan: Plan) -> Path:
    llmc.compile(DEMO, cache / "int8", plan=plan, quantize="int8", verify="none", device="onnxruntime")
    return cache / "int8"


class Checked:
    """The transformers model, which says of each greedy token whether it would have chosen it."""

    def __init__(self) -> None:
        self.model = TransformersReference(open_checkpoint(DEMO))
        self.ties = 0
        self._known: dict[tuple[int, ...], list[list[int]]] = {}

    def require_greedy(self, prompt: list[int], tokens: list[int], where: str) -> None:
        """Fails unless each token is the model's best after the prompt and the tokens before it.

        By induction, that is: unless `tokens` are what greedy decoding with the model produces.
        """
        if any(known[: len(tokens)] == tokens for known in self._known.get(tuple(prompt), ())):
            return
        end = len(prompt) + len(tokens) - 1
        rows = self.model.logits([*prompt, *tokens[:-1]], range(len(prompt) - 1, end))
        for at, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            margin = float(row.max() - row[token])
            assert margin < TIE, (
                f"{where}: token {at + 1} is {token}, transformers chooses {int(row.argmax())}, whose logit is "
                f"{margin:.4f} higher: more than the {TIE} that count as a tie"
            )
            self.ties += margin > 0
        self._known.setdefault(tuple(prompt), []).append(tokens)


@pytest.fixture(scope="module")
def transformers() -> Iterator[Checked]:
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield Checked()
    torch.set_num_threads(threads)


# float32: token by token


def groups() -> list[list[int]]:
    """Batches of 2 to 6 prompts, which take every prompt once, and of 7 and 8, which take some again, for less long."""
    order = np.random.default_rng(1).permutation(len(PROMPTS)).tolist()
    starts = np.cumsum([0, 2, 3, 4, 5, 6, 7])
    return [[order[(start + i) % len(order)] for i in range(size)] for size, start in enumerate(starts, 2)]


@full
def test_64_greedy_tokens_of_20_prompts_in_ragged_batches_of_every_size_are_those_of_transformers(
    exact_bundle: Path, transformers: Checked
) -> None:
    assert {i for group in groups() for i in group} == set(range(20))
    with BundleLLM(exact_bundle) as llm:
        for group in groups():
            count = PRODUCED if len(group) <= 6 else SHORT
            outputs = llm.generate([PROMPTS[i] for i in group], replace(GREEDY, max_tokens=count))
            assert len({len(o.prompt_token_ids) for o in outputs}) > 1, "ragged"
            for i, output in zip(group, outputs, strict=True):
                tokens = output.outputs[0].token_ids
                assert len(tokens) == count
                transformers.require_greedy(output.prompt_token_ids, tokens, f"prompt {i} in a batch of {len(group)}")
        assert llm.compilations == 0
    print(f"ties: {transformers.ties}")
    assert transformers.ties <= 2, "a tie is rare"


@full
def test_prompts_alone_are_answered_as_transformers_does(exact_bundle: Path, transformers: Checked) -> None:
    """Every fifth: the batches before had all."""
    with BundleLLM(exact_bundle) as llm:
        for i, prompt in enumerate(PROMPTS[::5]):
            (output,) = llm.generate([prompt], GREEDY)
            tokens = output.outputs[0].token_ids
            assert len(tokens) == PRODUCED
            transformers.require_greedy(output.prompt_token_ids, tokens, f"prompt {5 * i} alone")


@full
def test_decoding_with_transformers_own_cache_gives_the_same(exact_bundle: Path, transformers: Checked) -> None:
    with BundleLLM(exact_bundle) as llm:
        (output,) = llm.generate([PROMPTS[18]], replace(GREEDY, max_tokens=SHORT))
    assert output.outputs[0].token_ids == transformers.model.greedy(output.prompt_token_ids, SHORT)


# Speculation


@full
def test_greedy_text_with_drafts_is_the_models_in_fewer_steps(exact_bundle: Path, transformers: Checked) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    with BundleLLM(exact_bundle, keep_steps=True, speculative_config=drafts) as llm:
        steps = 0
        for prompt in PROMPTS[::4]:
            (output,) = llm.generate([prompt], GREEDY)
            transformers.require_greedy(output.prompt_token_ids, output.outputs[0].token_ids, str(prompt)[:20])
            decode = [step for step in output.steps if step.phase == "decode"]
            assert len(decode) == PRODUCED - 1 - sum(step.accepted for step in decode)
            steps += len(decode)
    assert steps < 0.8 * len(PROMPTS[::4]) * PRODUCED


# Continuous batching


@full
def test_requests_that_come_and_go_are_answered_as_each_alone(exact_bundle: Path, transformers: Checked) -> None:
    """Arrivals, cancels and priorities at random, prompts in chunks of 32 between decode steps, prefixes reused."""
    random = np.random.default_rng(5)
    with BundleLLM(exact_bundle, prefill_budget=32) as llm:
        engine = llm.engine
        queue = [int(i) for _ in range(2) for i in random.permutation(len(PROMPTS))]
        built: dict[str, list[int]] = {}
        ids: dict[str, list[int]] = {}
        cancelled: set[str] = set()
        reused = 0
        while queue or engine.has_work:
            for _ in range(min(len(queue), int(random.integers(0, 3)))):
                name, prompt = f"{len(queue)}", llm.encode(PROMPTS[queue.pop()])
                params = replace(GREEDY, max_tokens=int(random.integers(4, SHORT)))
                ids[name], built[name] = prompt, []
                engine.add(engine.prepare(Request(name, prompt, params, priority=int(random.integers(0, 2)))))
            if random.random() < 0.05:
                name = str(random.choice(list(built)))
                cancelled |= {update.request_id for update in engine.cancel(name)}
            for update in engine.step():
                built[update.request_id] += update.token_ids
                if update.finish_reason:
                    reused += update.cached_tokens
        for name, tokens in built.items():
            assert name in cancelled or len(tokens) >= 4
            if tokens:
                transformers.require_greedy(ids[name], tokens, f"request {name}")
        assert len(built) == 40 and cancelled and reused > 100
        stats = engine.stats
        assert (stats.running, stats.waiting, stats.kv_cache_usage, stats.compilations) == (0, 0, 0.0, 0)


# int8: close


@full
def test_int8_is_within_a_hundredth_of_a_nat_of_transformers(int8_bundle: Path, transformers: Checked) -> None:
    bundle = Bundle.open(int8_bundle)
    texts = sorted((bundle.tokenizer.encode(text) for text in TEXTS), key=len, reverse=True)
    assert sum(map(len, texts)) >= 386
    executor = open_executor(bundle)
    found, equal = [], []
    wanted = [transformers.model.logits(tokens, range(len(tokens))) for tokens in texts]
    for at in range(len(texts[0])):
        live = [tokens[at] for tokens in texts if len(tokens) > at]
        rows = executor.run(exact("decode", range(len(live)), [[token] for token in live], [at] * len(live)))
        for slot in range(len(live)):
            found.append(kl_divergence(wanted[slot][at], rows[slot]))
            equal.append(int(wanted[slot][at].argmax()) == int(rows[slot].argmax()))
    executor.close()
    print(
        f"mean KL {np.mean(found):.5f}, p99 {np.percentile(found, 99):.4f}, equal {np.mean(equal):.1%}, n {len(found)}"
    )
    assert np.mean(found) <= 0.01
    assert np.mean(equal) >= 0.93


# The whole way, from a file to an answer


@full
def test_the_file_and_the_bundle_built_of_it_know_the_capital_of_france(int8_bundle: Path, plan: Plan) -> None:
    params = llmc.SamplingParams(max_tokens=8, temperature=0)
    with llmc.LLM(demo_path(), plan=plan, verify="none", device="onnxruntime", quantize="int8") as llm:
        (from_file,) = llm.generate(["The capital of France is"], params)
    with llmc.LLM(int8_bundle) as llm:
        (from_bundle,) = llm.generate(["The capital of France is"], params)
    assert "Paris" in from_file.outputs[0].text
    assert from_bundle.outputs[0].token_ids == from_file.outputs[0].token_ids


# Damaged copies


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copyfile(demo_path(), tmp_path / "copy.gguf"))


def test_a_copy_is_the_same_checkpoint(copy: Path) -> None:
    assert open_checkpoint(copy).digest() == open_checkpoint(DEMO).digest()


@full
@pytest.mark.parametrize("part", [0, 4, 9, 300, 5_000, 1_000_000, 0.1, 0.5, 0.9999])
def test_a_flipped_bit_is_an_error_or_another_checkpoint_and_never_a_cache_hit(
    int8_bundle: Path, cache: Path, plan: Plan, copy: Path, part: float
) -> None:
    store = Store(cache / "cache")
    requested = CompileOptions("onnxruntime", "int8", verify="none")
    assert dry_run(CompileJob.of(str(copy), plan, requested), store)["cached"] == 1, (
        "what the bit is flipped in was known"
    )
    before = copy.stat()
    flip(copy, int(part if isinstance(part, int) else part * before.st_size))
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    try:
        damaged = open_checkpoint(copy)
        digest = Stages(store, damaged, plan, lambda _: None).checkpoint_digest()
        found = dry_run(CompileJob.of(str(copy), plan, requested), store)
    except CheckpointError as error:
        assert str(copy) in str(error)
    else:
        assert digest == damaged.digest() != open_checkpoint(DEMO).digest()
        assert found["cached"] == 0


@pytest.mark.parametrize("kept", [0, 3, 20, 4_000, 2_000_000, 0.5, -1])
def test_a_truncated_copy_is_an_error_that_names_the_file(copy: Path, plan: Plan, cache: Path, kept: float) -> None:
    size = copy.stat().st_size
    os.truncate(copy, size - 1 if kept == -1 else int(kept if isinstance(kept, int) else kept * size))
    with pytest.raises(CheckpointError, match=r"copy\.gguf"):
        llmc.compile(copy, cache / "truncated", plan=plan, verify="none", device="onnxruntime")
    assert not (cache / "truncated").exists()


# Certificates


@full
def test_it_is_warmed_up_and_certified(exact_bundle: Path) -> None:
    built = llmc.certify(exact_bundle, requests=12, threads=THREADS)
    assert built.compilations == 0
    (sessions,) = (monitor for monitor in built.monitors if monitor.monitor == "ONNX Runtime sessions")
    assert (sessions.before, sessions.after) == (1, 0)


@full
def test_a_swap_loses_no_request_and_changes_no_text(exact_bundle: Path, tmp_path: Path) -> None:
    """Of a bundle that differs in its manifest alone: a stream across the swap, and answers before and after it."""
    other = tmp_path / "other"
    shutil.copytree(exact_bundle, other, copy_function=os.link, ignore=shutil.ignore_patterns("manifest.*"))
    changed = Bundle.open(exact_bundle).manifest.to_dict()
    changed["summary"] = {**changed.get("summary", {}), "again": True}
    (other / "manifest.json").write_bytes(Manifest(changed).to_bytes())
    with Live(exact_bundle, reopen=lambda named, _: other, options=EngineOptions(THREADS)) as live:
        until(lambda: any(isinstance(event, Ready) for event in live.events), 60)
        requested: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 12}
        before = live.complete(**requested).json["choices"][0]["text"]
        across = live.call(stream=True, **requested)
        until(lambda: live.stats.running == 1)
        live.server.reload()
        until(lambda: any(isinstance(event, Retired) for event in live.events), 60)
        assert "".join(chunk["choices"][0]["text"] for chunk in across.answer.chunks) == before
        assert live.complete(**requested).json["choices"][0]["text"] == before
        assert [event for event in live.events if isinstance(event, SwapRefused)] == []


# Memory and CPUs


def _proportional(pid: int) -> int:
    """Bytes of a process's memory, where each page counts for its share among those that map it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


@full
@pytest.mark.skipif(usable_cpus() < 2, reason="replicas need a CPU each, and this host gives one")
def test_replicas_map_the_weights_once(int8_bundle: Path, tmp_path: Path) -> None:
    weights = Bundle.open(int8_bundle).files.path("weights").stat().st_size
    taken = []
    for replicas in (1, 2):
        with Process(tmp_path, int8_bundle, "--port", 0, "--replicas", replicas, "--threads", 1).ready() as server:
            for _ in range(replicas):
                assert server.complete(prompt=PROMPTS[0])[0] == 200
            children = psutil.Process(server.child.pid).children() if replicas > 1 else []
            taken.append(sum(_proportional(one.pid) for one in (psutil.Process(server.child.pid), *children)))
    one, two = taken
    assert two < 2 * one - 0.8 * weights


@full
def test_tokens_stay_the_same_when_half_of_the_cpus_are_taken_away(int8_bundle: Path) -> None:
    """As a control group does: of threads that run already, for each of which there was a CPU before."""
    allowed = os.sched_getaffinity(0)
    half = set(sorted(allowed)[: max(1, len(allowed) // 2)])
    with BundleLLM(int8_bundle, threads=len(allowed)) as llm:
        before = [one.outputs[0].token_ids for one in llm.generate(PROMPTS[:4], GREEDY)]
        try:
            _allow(half)
            after = [one.outputs[0].token_ids for one in llm.generate(PROMPTS[:4], GREEDY)]
        finally:
            _allow(allowed)
    assert after == before


def _allow(cpus: set[int]) -> None:
    """Let all threads of this process run on these alone."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cpus)
