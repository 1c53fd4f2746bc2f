"""A file says by its beginning what it is; a name that is given says it too."""

from __future__ import annotations

import gzip
import json

import pytest

from llmc.buckets.traffic.formats import FORMATS, create, recognise
from llmc.buckets.traffic.reader import Trace
from llmc.buckets.traffic.trace_file import TraceFile
from llmc.errors import InputError, UnknownNameError
from tests.buckets.traffic.files import AZURE, written
from tests.buckets.traffic.formats import logs

USAGE = '{"created": 1700000000, "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n'
STEP = '{"batch_id": 1, "total_num_scheduled_tokens": 5, "padded_total_num_scheduled_tokens": 16, "num_reqs": 1}\n'
TABLE = "| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |\n"
SIZES = "INFO 11-23 12:00:00 Batchsize forward time stats (batchsize, count, median_time(ms)): [(8, 2, 1.5)]\n"
GAUDI = "WARNING 11-23 12:00:00 Prompt bucket for (1, 2108, 0) was not prepared. Adding new bucket: (1, 2304, 0)\n"
WARM = "INFO 11-23 12:00:00 [Warmup][Prompt][1/2] batch_size:1 query_len:128 num_blocks:0 free_mem:55.43 GiB\n"

SEEN = [
    ("csv", AZURE),
    ("jsonl", '{"time": 1, "prompt_tokens": 5, "output_tokens": 2}\n'),
    ("openai", USAGE),
    ("openai", '10.0.0.1 - - "GET /health" 200\n' + USAGE),
    ("otlp", logs.batch(logs.span("a", "b", 1, {"gen_ai.usage.input_tokens": 5}))),
    ("vllm-requests", logs.received("cmpl-1", 5, 1)),
    ("vllm-cudagraphs", "INFO 11-23 12:00:00 [cuda_graph.py:117] " + TABLE),
    ("vllm-batchsizes", SIZES),
    ("vllm-gaudi", GAUDI),
    ("vllm-gaudi", WARM),
    ("tpu-steps", STEP),
    ("prometheus", logs.scrape([1, 1, 1], [1, 1, 1])),
    ("prometheus-api", '{"status":"success","data":{"resultType":"matrix","result":[]}}'),
]


@pytest.mark.parametrize(("name", "text"), SEEN)
@pytest.mark.parametrize("file", ["log", "log.txt", "log.json", "log.gz"])
def test_the_text_reports_whatever_the_file_is_called(tmp_path, name, text, file):
    content = gzip.compress(text.encode()) if file.endswith(".gz") else text
    assert recognise(TraceFile(written(tmp_path, file, content))).name == name


@pytest.mark.parametrize(("name", "text"), SEEN)
def test_a_server_that_says_much_at_its_start_is_still_recognised(tmp_path, name, text):
    if name.startswith("vllm"):
        start = "INFO 11-23 12:00:00 [init.py:1] Loading safetensors checkpoint shards\n" * 3000
        assert recognise(TraceFile(written(tmp_path, "log", start + text))).name == name


def test_every_format_says_what_it_is_and_where_it_was_read():
    for name in FORMATS.names():
        assert create(name).name == name
        assert create(name).title and create(name).source


def test_what_looks_like_nothing_is_refused_with_what_is_known(tmp_path):
    with pytest.raises(InputError, match=r"log: matches no known traffic format: .*vLLM request log.*--fields"):
        recognise(TraceFile(written(tmp_path, "log", "hello\n" * 50)))
    with pytest.raises(InputError, match="log: the file is empty"):
        recognise(TraceFile(written(tmp_path, "log", "\n \n")))


def test_the_format_can_be_said(tmp_path):
    path = written(tmp_path, "log", USAGE)
    assert len(list(Trace(path, format="openai"))) == 1
    with pytest.raises(InputError, match="no column for the prompt tokens"):
        Trace(path, format="jsonl")
    with pytest.raises(UnknownNameError, match="unknown traffic format 'vllm'; known: csv, fields"):
        Trace(path, format="vllm")
    with pytest.raises(InputError, match="leave out --fields"):
        Trace(path, format="openai", fields={"prompt": "a", "output": "b"})


def test_steps_are_no_requests(tmp_path):
    with pytest.raises(InputError, match="is a vLLM batch-size log, which counts steps and records no requests"):
        Trace(written(tmp_path, "log", SIZES))


def test_a_log_may_grow_while_it_is_read_but_not_by_half_an_object(tmp_path):
    path = written(tmp_path, "log", USAGE + USAGE[:30])
    with pytest.raises(InputError, match="log: line 2, column 25: not valid JSON"):
        list(Trace(path))


def test_torn_gzip_is_named(tmp_path):
    whole = gzip.compress((USAGE * 5000).encode())
    with pytest.raises(InputError, match=r"log\.gz: damaged gzip file"):
        list(Trace(written(tmp_path, "log.gz", whole[: len(whole) // 2])))


@pytest.mark.parametrize("name", ["openai", "otlp", "vllm-requests", "jsonl", "csv"])
def test_a_line_of_hostile_size_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr("llmc.buckets.traffic.trace_file.MAX_LINE_BYTES", 1 << 16)
    monkeypatch.setattr("llmc.buckets.traffic.trace_file.CHUNK_BYTES", 1 << 12)
    text = next(text for known, text in SEEN if known == name).rstrip("\n")
    with pytest.raises(InputError, match="a line is longer than"):
        list(Trace(written(tmp_path, "log", f"{text}\n{json.dumps('x' * (1 << 17))}\n")))
