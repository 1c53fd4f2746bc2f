"""Where, when, by whom and with how many jobs something is compiled changes no key, and no byte of what is made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.artifacts.store.store import Store
from llmc.buckets.plan import Plan, Provenance
from llmc.compiler import stages
from llmc.compiler.checkpoint import open_checkpoint
from llmc.settings import KERNEL_VARIABLES
from llmc.testing.toy import toy_plan, write_toy
from tests.artifacts.helpers import REPO
from tests.compiler.keyed import Compiled, Keyed
from tests.tiers import default_cases, full


@pytest.mark.parametrize("jobs", [1, 3])
def test_how_a_compile_is_run_changes_no_key(keyed: Keyed, jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    base = keyed.ask()
    assert keyed.ask(jobs=jobs, require_native=keyed.options["device"] != "hpu") == base or jobs > 1
    noise = {"LLMC_THREADS": "1", "OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "3", "ORT_LOGGING_LEVEL": "0"}
    for name, value in noise.items():
        monkeypatch.setenv(name, value)
    assert sorted(key.digest for key in keyed.ask(jobs=jobs)) == sorted(key.digest for key in base)


def test_how_a_plan_came_to_be_changes_no_key(keyed: Keyed) -> None:
    plan = keyed.plan
    reported = Provenance("linear", {"prompt_batch": {"max": 8}}, {"prompt_batch.max": "environment VLLM_PROMPT_BS"})
    assert keyed.ask(plan=Plan(plan.limits, plan.buckets, reported)) == keyed.ask()


def test_where_and_when_a_checkpoint_was_written_changes_no_key(keyed: Keyed, tmp_path: Path) -> None:
    """Another folder, member order, order of files, mode and time."""
    copy = tmp_path / "far away" / "copy"
    copy.mkdir(parents=True)
    for path in sorted(keyed.model.iterdir(), reverse=True):
        if path.suffix == ".json" and path.name != "tokenizer.json":
            members = json.loads(path.read_text())
            if path.name == "config.json":
                members["_name_or_path"] = str(tmp_path)
            (copy / path.name).write_text(json.dumps(dict(reversed(members.items())), indent=4))
        else:
            shutil.copyfile(path, copy / path.name)
        (copy / path.name).chmod(0o600)
        os.utime(copy / path.name, (1, 1))
    (copy / "README.md").write_text("not part of the model")
    assert keyed.ask(model=copy) == keyed.ask()


def test_a_file_that_was_just_written_is_not_believed_to_stay_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writes within one tick of the clock leave the same times: a digest of the first must not stand for both."""
    model = write_toy(tmp_path / "model")
    store = Store(tmp_path / "store")
    run = stages.Stages(store, open_checkpoint(model), toy_plan(), lambda _: None)
    monkeypatch.setattr(stages, "settled", lambda seen: False)
    first = run.checkpoint_digest()
    assert store.entries("local-file-digest") == []
    monkeypatch.undo()
    monkeypatch.setattr(stages, "settled", lambda seen: True)
    assert run.checkpoint_digest() == first
    assert len(store.entries("local-file-digest")) == 2, "weights and tokenizer; the rest counts by value"


# In other surroundings, for real

COMPILE = """
import json, os, sys, time
from pathlib import Path
folder, device, model, jobs, verify, late, mask = sys.argv[1:]
os.umask(int(mask, 8))
if late:
    real = time.time
    time.time = lambda: real() + 1e8
os.chdir(folder)
from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from tests.compiler.conftest import SMALL
found = {}
for name in device.split(","):
    options = {} if name == "fake" else {"quantize": "none"}
    asked = CompileOptions.of(device=name, jobs=int(jobs), verify=verify, specialise=True, **options)
    compile_bundle(model, Path("bundle"), SMALL, asked, Store("store"), lambda _: None)
for entry in Store("store").entries():
    if not entry.key.is_local and entry.key.kind != "bundle":
        found[entry.key.digest] = [entry.key.kind, {n: b.digest for n, b in entry.outputs.items()}]
print(json.dumps(found))
"""
BuiltExecutable = dict[str, list[object]]


def compile_in(
    folder: Path, device: str, model: object, *, jobs: int = 1, verify: str = "all", late: str = "", umask: str = "022",
    before: tuple[str, ...] = (), **environment: str,
) -> BuiltExecutable:  # fmt: skip
    """What a process of its own makes in `folder`: outputs by key."""
    folder.mkdir(parents=True)
    command = [*before, sys.executable, "-c", COMPILE, folder, device, model, jobs, verify, late, umask]
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", *KERNEL_VARIABLES) if name in os.environ}
    ran = subprocess.run(
        [str(part) for part in command], env={**kept, "PYTHONPATH": str(REPO), **environment}, cwd=REPO,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    built: BuiltExecutable = json.loads(ran.stdout.splitlines()[-1])
    return built


def other_host() -> tuple[str, ...]:
    """A prefix that runs a program as root of a host of another name; none where that is not allowed."""
    prefix = ("unshare", "-Uru", sys.executable, "-c")
    script = "import os, socket, sys; socket.sethostname('elsewhere'); os.execvp(sys.argv[1], sys.argv[1:])"
    allowed = (
        shutil.which("unshare") is not None
        and not subprocess.run([*prefix, script, "true"], capture_output=True, check=False).returncode
    )
    return (*prefix, script) if allowed else ()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BuiltExecutable]:
    """A toy checkpoint, and what compiling it makes where nothing is unusual."""
    folder = tmp_path_factory.mktemp("plain")
    model = write_toy(folder / "model")
    return model, compile_in(folder / "work", "fake", model, PYTHONHASHSEED="0")


@default_cases(1)
@pytest.mark.parametrize("what", ["place", "process", "host", "time"])
def test_a_compile_elsewhere_makes_the_same_keys_and_bytes(
    what: str, plain: tuple[Path, BuiltExecutable], tmp_path: Path
) -> None:
    model, expected = plain
    work = tmp_path / "some other place" / "\u00fcber"
    temporary, home = tmp_path / "tmp", tmp_path / "home"
    temporary.mkdir()
    home.mkdir()
    moved = tmp_path / "moved"
    if what == "place":
        shutil.copytree(model, moved)
        built = compile_in(work, "fake", os.path.relpath(moved, work), HOME=str(home), TMPDIR=str(temporary))
    elif what == "process":
        noise = {"LLMC_THREADS": "2", "OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONOPTIMIZE": "0"}
        built = compile_in(work, "fake", model, jobs=5, umask="077", PYTHONHASHSEED="77", **noise)
    elif what == "host":
        user = {"USER": "nobody", "LOGNAME": "nobody", "HOSTNAME": "elsewhere", "POD_IP": "10.1.2.3"}
        built = compile_in(work, "fake", model, before=other_host(), **user)
    else:
        shutil.copytree(model, moved)
        for path in moved.iterdir():
            os.utime(path, (10, 10))
        built = compile_in(work, "fake", moved, late="yes", TZ="Asia/Tokyo", LC_ALL="tr_TR.UTF-8", LANG="tr_TR.UTF-8")
    assert {kind for kind, _ in expected.values()} == {
        "trace",
        "weights",
        "executable",
        "tokenizer",
        "reference",
        "verify",
    }
    assert built == expected


@full
def test_real_models_too_are_the_same_in_another_process(compiled: Compiled, tmp_path: Path) -> None:
    """Tracing walks sets and dictionaries, and names what it meets: neither order nor names may get out."""
    expected = {
        entry.key.digest: [kind, {name: blob.digest for name, blob in entry.outputs.items()}]
        for device in ("cpu", "hpu") for kind, entries in compiled(device)[0].known.items() for entry in entries
        if not entry.key.is_local and kind not in ("bundle", "reference", "verify")
    }  # fmt: skip
    moved = shutil.copytree(compiled("cpu")[0].model, tmp_path / "moved")
    surroundings = {"PYTHONHASHSEED": "77", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    built = compile_in(tmp_path / "work", "cpu,hpu", moved, verify="none", umask="077", **surroundings)
    assert built == expected
