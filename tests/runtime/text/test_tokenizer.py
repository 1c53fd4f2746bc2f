"""Text to ids and back; streams equal to whole decoding; stop strings."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordLevel

from llmc.errors import ArtifactError, InputError
from llmc.runtime.engine.text_assembly import StopChecker, StopStrings
from llmc.runtime.text.tokenizer import StreamDetokenizer, Tokenizer
from tests.tiers import examples
from tests.timing import least_cpu_seconds

BYTES = pre_tokenizers.ByteLevel.alphabet()


@cache
def byte_level() -> Tokenizer:
    """Every byte, some pairs that split characters, special and ordinary added tokens."""
    names = sorted(BYTES)
    pairs = ["Ġa", "Ã©", "ðŁ", "ĺĢ", "à¤", "©Ã", "ĠðŁ"]
    backend = Backend(BPE({name: index for index, name in enumerate(names + pairs)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<s>"])
    backend.add_tokens([AddedToken("é ü", normalized=False), AddedToken("日本", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return Tokenizer(backend.to_str().encode(), eos_token_ids=[backend.token_to_id("<|end|>")])


@cache
def sentence_piece(strip: bool = True) -> Tokenizer:
    """Llama 2's decoder: bytes as <0x..>, a space mark, one leading space dropped."""
    words = ["<unk>", "<s>", "▁", "▁a", "a", "b", "▁▁", "é", "日", "a▁b", "�"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Backend(BPE({word: index for index, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<unk>", "<s>"])
    return Tokenizer(backend.to_str().encode())


@cache
def word_level(decoder: str) -> Tokenizer:
    words = ["hello", "wor", "##ld", "▁hi", "▁there", "x</w>", "y", ".", "'", "n't"]
    backend = Backend(WordLevel({word: index for index, word in enumerate(words)}, unk_token="y"))
    backend.decoder = {
        "wordpiece": decoders.WordPiece(), "metaspace": decoders.Metaspace(), "bpe": decoders.BPEDecoder(),
        "bytes": decoders.Sequence([decoders.ByteLevel()]),
    }[decoder]  # fmt: skip
    return Tokenizer(backend.to_str().encode())


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    stream = StreamDetokenizer(tokenizer, skip_special_tokens=skip)
    return [stream.feed(index) for index in ids] + [stream.flush()]


def test_encode_adds_special_tokens_only_if_requested():
    tokenizer = byte_level()
    start = tokenizer.token_to_id("<s>")
    plain = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.encode("ab") == [start, *plain]
    assert [tokenizer.id_to_token(index) for index in plain] == ["a", "b"]
    assert tokenizer.encode("<|end|>", add_special_tokens=False) == list(tokenizer.eos_token_ids)


def test_special_tokens_are_skipped_unless_requested():
    tokenizer = byte_level()
    ids = tokenizer.encode("hé<|end|>")
    assert tokenizer.decode(ids) == "hé"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hé<|end|>"
    assert tokenizer.vocab_size == 256 + 7 + 4


def test_truncation_and_padding_of_the_file_are_switched_off():
    backend = Backend.from_str(byte_level()._backend.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert len(Tokenizer(backend.to_str().encode()).encode("abcdef", add_special_tokens=False)) == 6


def test_of_too_many_ids_the_last_are_given_or_none():
    tokenizer = byte_level()
    ids = tokenizer.encode("one two three four five six")
    assert len(ids) > 3
    assert tokenizer.encode_last("one two three four five six", 3) == (ids[-3:], len(ids))
    assert tokenizer.encode_last("one two three four five six", 3, shortened=False) == ([], len(ids))
    assert tokenizer.encode_last("one two three four five six", len(ids), shortened=False) == (ids, len(ids))


def test_a_text_of_millions_that_is_refused_is_never_listed(monkeypatch):
    class Millions:
        def __len__(self):
            return 5_000_000

        def encode_batch_fast(self, texts, add_special_tokens):
            return [self]

    tokenizer = byte_level()
    monkeypatch.setattr(tokenizer, "_whole", Millions())  # which have no ids to list
    assert tokenizer.encode_last("a" * 10_000, 100, shortened=False) == ([], 5_000_000)


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b"[]", b"null", b'{"model": {"type": "BPE"}}'])
def test_what_is_no_tokenizer_is_an_artifact_error(data):
    with pytest.raises(ArtifactError, match=r"tokenizer\.json is damaged"):
        Tokenizer(data)


def test_bad_input_is_an_input_error():
    tokenizer = byte_level()
    with pytest.raises(InputError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(InputError):
        tokenizer.decode([-1])
    with pytest.raises(InputError):
        tokenizer.decode(["a"])
    for each in (byte_level(), sentence_piece()):
        with pytest.raises(InputError):
            StreamDetokenizer(each).feed(-1)


def test_ids_without_a_token_add_nothing():
    for tokenizer in (byte_level(), sentence_piece()):
        ids = tokenizer.encode("a", add_special_tokens=False)
        assert tokenizer.decode([*ids, 99_999]) == tokenizer.decode(ids)
        assert "".join(streamed(tokenizer, [*ids, 99_999, *ids])) == tokenizer.decode(ids + ids)


def test_a_character_split_over_tokens_comes_out_whole():
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(token) for token in ("a", "ðŁ", "ĺ", "Ģ", "b")]
    assert streamed(tokenizer, ids) == ["a", "", "", "😀", "b", ""]


def test_an_unfinished_character_comes_out_at_the_end():
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(token) for token in ("a", "ðŁ")]
    assert streamed(tokenizer, ids) == ["a", "", "\ufffd"]


def test_leading_spaces_are_those_of_whole_decoding():
    tokenizer = sentence_piece()
    ids = [tokenizer.token_to_id(token) for token in ("▁a", "▁a", "▁", "▁a")]
    assert streamed(tokenizer, ids) == ["a", " a", " ", " a", ""]


@examples(300)
@given(st.lists(st.integers(0, 270), max_size=40), st.booleans())
def test_a_byte_level_stream_equals_decoding_at_once(ids, skip):
    tokenizer = byte_level()
    assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@examples(150)
@given(st.text(max_size=30))
def test_a_byte_level_stream_gives_back_any_text(text):
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = streamed(tokenizer, ids, skip=False)
    assert "".join(pieces) == text
    assert "\ufffd" in text or all("\ufffd" not in piece for piece in pieces)


@examples(300)
@given(st.lists(st.one_of(st.integers(0, 10), st.integers(11, 266)), max_size=40), st.booleans(), st.booleans())
def test_a_sentence_piece_stream_equals_decoding_at_once(ids, skip, strip):
    tokenizer = sentence_piece(strip)
    assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@examples(100)
@given(st.text(alphabet="ab é日😀 ", max_size=20))
def test_a_sentence_piece_stream_of_bytes_gives_back_the_text(text):
    tokenizer = sentence_piece(strip=False)
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    assert "".join(streamed(tokenizer, ids)) == text


@pytest.mark.parametrize("decoder", ["wordpiece", "metaspace", "bpe", "bytes"])
@examples(60)
@given(st.lists(st.integers(0, 9), max_size=20))
def test_other_decoders_stream_as_they_decode(decoder, ids):
    tokenizer = word_level(decoder)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_time_per_token_does_not_grow(make):
    """20 times the tokens take about 20 times the time, not 400 times; malformed bytes included."""
    tokenizer = make()
    names = ("a", "ðŁ", "ĺ") if make is byte_level else ("a", "<0xF0>", "é")
    pattern = [tokenizer.token_to_id(name) for name in names]
    streamed(tokenizer, pattern)

    def seconds(count: int) -> float:
        return least_cpu_seconds(lambda: streamed(tokenizer, pattern * count), 3)

    assert seconds(4000) < 100 * max(seconds(200), 1e-4)


@pytest.mark.real_weights
def test_the_demo_model_streams_any_text():
    from llmc.compiler.checkpoint import open_checkpoint

    tokenizer = Tokenizer(open_checkpoint("smollm2-demo").tokenizer_json(), [2])
    text = "Hello, wörld! 日本語 👨‍👩‍👧‍👦\n    code(x) == 12345  "
    ids = tokenizer.encode(text)
    assert "".join(streamed(tokenizer, ids)) == text == tokenizer.decode(ids)
    assert tokenizer.is_byte_level and tokenizer.special_ids == frozenset(range(17))


# Stop strings


def checked(stops, pieces):
    checker = StopChecker(stops)
    text = "".join(checker.feed(piece) for piece in pieces)
    return text + checker.flush(), checker.matched


def reference(stops, text):
    """The first stop string to be complete; of those complete at once, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            best = max(found, key=len)
            return text[: end - len(best)], best
    return text, None


def test_text_is_cut_before_the_stop_string():
    assert checked(["###"], ["one #", "# two ##", "# three"]) == ("one ## two ", "###")
    assert checked(["\n\n"], ["a\nb\n", "\nc"]) == ("a\nb", "\n\n")


def test_what_may_become_a_stop_string_is_held_back_and_nothing_else():
    checker = StopChecker(["</s>"])
    assert [checker.feed(piece) for piece in ("a<", "/", "b", "<</", "s")] == ["a", "", "</b", "<", ""]
    assert checker.matched is None and checker.flush() == "</s"


def test_nothing_comes_after_a_stop():
    checker = StopChecker(["x"])
    assert [checker.feed("axb"), checker.feed("c"), checker.flush()] == ["a", "", ""]


def test_no_stop_strings_hold_nothing_back():
    assert [StopChecker().feed("abc"), StopChecker().flush()] == ["abc", ""]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InputError):
        StopChecker(["a", ""])


@examples(400)
@given(
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    st.lists(st.text(alphabet="abc", max_size=6), max_size=12),
)
def test_stops_do_not_depend_on_how_text_is_divided(stops, pieces):
    text = "".join(pieces)
    assert checked(stops, pieces) == checked(stops, list(text)) == reference(stops, text)


def test_a_tokenizer_json_decoder_of_one_step_is_known():
    assert json.loads(word_level("bytes")._backend.to_str())["decoder"]["type"] == "Sequence"
    assert word_level("bytes").is_byte_level and not word_level("bpe").is_byte_level


def test_a_character_costs_the_same_however_many_stop_strings_there_are():
    one = StopStrings(["a" * 255 + "b"])
    many = StopStrings(["a" * (255 - i) + "b" * (i + 1) for i in range(64)])
    text = "a" * 20_000

    def seconds(stops):
        return least_cpu_seconds(lambda: StopChecker(stops).feed(text))

    assert seconds(many) < 5 * seconds(one)
