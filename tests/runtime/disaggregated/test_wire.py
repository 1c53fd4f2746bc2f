"""Frames: what arrives is what was sent, in the caches' narrower type; and the facts of both sides."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.errors import ArtifactError, InputError
from llmc.runtime.disaggregated.facts import SideFacts, require_fit
from llmc.runtime.disaggregated.wire import Dtype, Frames, PeerAddress, narrower
from tests.hostile import changed
from tests.tiers import examples

FACTS = SideFacts(
    "bundle", "fake", {"config.json": "a", "model.safetensors": "b"}, "sha256:c", 257, ((2, 8), (2, 8)), "f32", "f32",
    "none", 32, 31,
)  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ("f32", "f32", "f32"), ("f32", "f16", "f16"), ("bf16", "f32", "bf16"), ("f16", "f16", "f16"),
        ("bf16", "bf16", "bf16"), ("f16", "bf16", "f32"), ("u8", "u8", "f32"), ("u8", "f32", "f32"),
    ],
)  # fmt: skip
def test_a_prefix_travels_in_the_narrower_type_that_loses_nothing(one: str, other: str, wanted: Dtype) -> None:
    assert narrower(one, other) == narrower(other, one) == wanted


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@given(length=st.integers(0, 40), seed=st.integers(0, 99))
@examples(10, database=None, derandomize=True)
def test_what_arrives_is_what_was_sent_rounded_to_its_type(dtype: Dtype, length: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(size=300).astype(np.float32)
    prefix = [random.normal(size=(2, length, 8)).astype(np.float32) for _ in range(4)]
    left, right = socket.socketpair()
    sender, receiver = Frames(left), Frames(right)
    thread = threading.Thread(target=lambda: sender.send_prefix({"number": 7}, logits, prefix, dtype))
    thread.start()
    header = receiver.receive(5)
    assert header is not None and (header["number"], header["dtype"]) == (7, dtype)
    got, tensors = receiver.take_prefix(300, [(2, length, 8)] * 4, dtype)
    thread.join()
    sender.close()
    assert receiver.receive(5) is None
    np.testing.assert_array_equal(got, logits)
    for one, sent in zip(tensors, prefix, strict=True):
        assert one.dtype == np.float32 and one.shape == sent.shape
        np.testing.assert_allclose(one, sent, rtol={"f32": 0, "f16": 2**-11, "bf16": 2**-8}[dtype], atol=1e-7)
    for frames in (sender, receiver):
        frames.release()


def test_facts_survive_their_json() -> None:
    assert SideFacts.from_json(json.loads(json.dumps(FACTS.to_json()))) == FACTS


@given(found=changed(json.loads(json.dumps(FACTS.to_json()))))
@examples(80, database=None, derandomize=True)
def test_facts_of_a_hostile_peer_are_facts_or_refused(found: Any) -> None:
    try:
        facts = SideFacts.from_json(found)
    except InputError:
        return
    assert SideFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"checkpoint": {"config.json": "a", "model.safetensors": "x"}}, r"differ \(in model.safetensors\)"),
        ({"tokenizer": "sha256:d"}, "tokenizers differ"),
        ({"vocab_size": 258}, "vocabularies of 258 and 257"),
        ({"shapes": ((2, 8),)}, "caches of 1 and 2 tensors"),
        ({"shapes": ((2, 8), (1, 16))}, "tensor 1 of the cache has 1 heads of 16 numbers there, 2 of 8 here"),
    ],
)
def test_what_does_not_fit_is_named(differs: dict[str, Any], said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        require_fit(replace(FACTS, **differs), FACTS)


def test_what_differs_and_is_no_obstacle_is_reported() -> None:
    reported = require_fit(replace(FACTS, quantize="int8", dtype="bf16", longest_prompt=15), FACTS)
    assert [one.split()[0] for one in reported] == ["quantization", "dtype", "prompts"]
    assert "of more than 15 tokens (up to 31) are computed here" in reported[2]
    assert require_fit(FACTS, FACTS) == []


@pytest.mark.parametrize("text", ["tcp://[::1]:80", "tcp://host:8100", "unix:/run/x"])
def test_addresses_are_read_and_shown_alike(text: str) -> None:
    assert str(PeerAddress.parse(text)) == text


@pytest.mark.parametrize("text", ["tcp://", "tcp://host", "tcp://:1", "tcp://h:70000", "unix:"])
def test_half_an_address_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        PeerAddress.parse(text)


def test_a_path_is_no_address() -> None:
    assert PeerAddress.parse("bundle") is None
