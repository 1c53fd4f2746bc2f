"""Where a bundle's verification comes from, as verify, generate -v, cache show and /metrics tell: every way in, signed
and unsigned, forged and forgotten."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.bundle.stored import bundle_key
from llmc.artifacts.local.origins import own_key
from llmc.artifacts.remotes.base import entry_name
from llmc.artifacts.signing.keys import read_public
from llmc.artifacts.store.entries import encode_entry
from llmc.artifacts.store.store import Store
from llmc.cli.main import main
from llmc.testing.toy import write_toy
from tests.artifacts.helpers import child, finish, flip, overwrite
from tests.cli.conftest import surround
from tests.cli.helpers import Llmc
from tests.devices import negated, use
from tests.manifests import edit_manifest
from tests.server.live import Live
from tests.tiers import default_cases, full

FLAGS = ("--device", "fake", "--max-model-len", 32, "--max-num-seqs", 4, "-q")
MODEL = ("--reference", "../toy")
UNKNOWN = "from elsewhere, unsigned: this store does not know it"


class Machine:
    """A user with a store and a folder of trusted keys; what is called runs there."""

    def __init__(self, llmc: Llmc, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self._llmc, self._monkeypatch = folder, llmc, monkeypatch

    @property
    def store(self) -> Store:
        return Store(self.folder / "cache")

    def __call__(self, *command: object, **environment: str) -> Any:
        with self._monkeypatch.context() as patch:
            self._enter(patch, **environment)
            return self._llmc(*command)

    def _enter(self, patch: pytest.MonkeyPatch, **environment: str) -> None:
        for name, value in {
            "LLMC_CACHE_DIR": str(self.folder / "cache"), "LLMC_TRUSTED_KEYS": str(self.folder / "trusted"),
            "LLMC_ALLOW_UNSIGNED": "1", **environment,
        }.items():  # fmt: skip
            patch.setenv(name, value)

    def compile(self, toy: Path, bundle: str = "made", **environment: str) -> dict[str, Any]:
        """What the bundle's verification says was taken from elsewhere; {} for nothing."""
        assert self("compile", toy, *FLAGS, "-o", bundle, **environment).code == 0
        found: dict[str, Any] = read_manifest(bundle).verification.get("elsewhere", {})
        return found

    def reported(self, bundle: object, **environment: str) -> str:
        """The one line of generate -v."""
        ran = self("generate", bundle, "--prompt", "a", "--max-tokens", 1, "-v", **environment)
        assert ran.code == 0, ran
        (line,) = [line for line in ran.err.splitlines() if "verification" in line]
        return str(line).removeprefix("llmc: verification: ").partition("; `llmc verify")[0]

    def metric(self, bundle: Path | str, **environment: str) -> str:
        """The label that /metrics has."""
        from llmc.runtime.bundle import Bundle

        with self._monkeypatch.context() as patch:
            self._enter(patch, **environment)
            with Live(lambda _: Bundle.open(bundle)) as live:
                lines = live.ready().get("/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith("llmc:verification_info{")]
        assert line.endswith("} 1.0")
        return re.findall(r'origin="(\w+)"', line)[0]

    def origin(self, bundle: str, **environment: str) -> tuple[str, tuple[str, ...]]:
        """What all of them say, which has to be one thing; asking changes nothing but by `llmc verify`, the last."""
        words, label = self.reported(bundle, **environment), self.metric(bundle, **environment)
        assert f"\nverification: {words}" in self("cache", "show", bundle, **environment).out
        found = self("verify", bundle, *MODEL, "--json", **environment).json["recorded"]
        assert found["origin"] == label
        start = {"here": "created here", "signed": "signed by ", "none": "no outcome is recorded"}.get(label)
        assert words.startswith(start) if start else "from elsewhere, unsigned" in words
        return label, tuple(found["signers"])


@pytest.fixture
def mine(llmc: Llmc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(llmc, monkeypatch, tmp_path / "mine")


@pytest.fixture
def theirs(llmc: Llmc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(llmc, monkeypatch, tmp_path / "theirs")


@pytest.fixture(scope="session")
def their_work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bundle that they compiled, their key and the store of the compile, which nobody changes."""
    folder = tmp_path_factory.mktemp("theirs")
    model = write_toy(folder / "toy")
    with pytest.MonkeyPatch.context() as patch:
        surround(patch, folder, folder / "cache")
        assert main([str(word) for word in ("compile", model, *FLAGS, "-o", "bundle")]) == 0
        assert main(["cache", "keygen", "release"]) == 0
    assert "elsewhere" not in read_manifest(folder / "bundle").verification
    return folder


@pytest.fixture
def bundle(theirs: Machine, their_work: Path, toy: Path, here: Path) -> Path:
    """Compiled by them, who have a key: copies of `their_work`."""
    shutil.copytree(their_work / "cache", theirs.folder / "cache")
    for name in ("release", "release.pub"):
        shutil.copy2(their_work / name, here / name)
    return shutil.copytree(their_work / "bundle", here / "bundle")


def key_id() -> str:
    return read_public(Path("release.pub")).id


# Bundles, by every way in


def by_folder(mine: Machine, theirs: Machine, bundle: Path, far: Path) -> str:
    assert theirs("cache", "push", far, bundle).code == 0
    assert mine("cache", "pull", far, "-o", "came").code == 0
    return "came"


def by_layout(mine: Machine, theirs: Machine, bundle: Path, far: Path) -> str:
    assert theirs("cache", "push", f"oci-layout:{far}:latest", bundle).code == 0
    return f"oci-layout:{far}:latest"


def by_archive(mine: Machine, theirs: Machine, bundle: Path, far: Path) -> str:
    assert theirs("cache", "export", f"{far}.tar", bundle).code == 0
    return f"{far}.tar"


def by_import(mine: Machine, theirs: Machine, bundle: Path, far: Path) -> str:
    assert theirs("cache", "export", f"{far}.tar", bundle).code == 0
    assert mine("cache", "import", f"{far}.tar", "-o", "came").code == 0
    return "came"


def by_archive_of_several(mine: Machine, theirs: Machine, bundle: Path, far: Path) -> str:
    assert theirs("cache", "push", far, bundle).code == 0  # which puts the folder's signature into their store
    assert theirs("cache", "export", f"{far}.tar").code == 0
    assert mine("cache", "import", f"{far}.tar").code == 0
    return f"store:{read_manifest(bundle).digest[7:]}"


def by_copy(mine: Machine, theirs: Machine, bundle: Path, far: Path) -> str:
    shutil.copytree(bundle, "came")
    return "came"


WAYS = (by_folder, by_layout, by_archive, by_import, by_archive_of_several, by_copy)


@default_cases(2)
@pytest.mark.parametrize("signed", ["not", "by a stranger", "by a trusted key"])
@pytest.mark.parametrize("way", WAYS)
def test_a_bundle_from_elsewhere_is_not_built_here(
    mine: Machine, theirs: Machine, bundle: Path, tmp_path: Path, way: Callable[..., str], signed: str
) -> None:
    if signed != "not":
        assert theirs("cache", "sign", bundle, "--key", "release").code == 0
    if signed == "by a trusted key":
        assert mine("cache", "trust", "release.pub").code == 0
    came = way(mine, theirs, bundle, tmp_path / "far")
    if signed == "by a trusted key":
        assert mine.origin(came) == ("signed", (key_id(),))
        assert mine("cache", "trust", "--remove", "release").code == 0
        assert mine.reported(came) == "created here", "it was verified again meanwhile"
    else:
        assert mine.origin(came) == ("unsigned", ())
    assert theirs.origin(str(bundle)) == ("here", ())


def test_from_a_shared_store(mine: Machine, bundle: Path, theirs: Machine) -> None:
    shared = str(theirs.folder / "cache")
    name = f"store:{read_manifest(bundle).digest[7:]}"
    assert mine.origin(name, LLMC_SHARED_CACHE=shared) == ("unsigned", ())


def test_verify_says_so_in_words_and_clears_it(mine: Machine, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        use(patch, replay=negated)
        assert mine("verify", bundle, *MODEL, "-q").code == 4
    assert mine.reported(bundle) == UNKNOWN, "what failed vouches for nothing"
    assert "does it again here" in mine("generate", bundle, "--prompt", "a", "-v").err
    assert mine("verify", bundle, *MODEL).out.splitlines()[2:] == [
        f"recorded verification: {UNKNOWN}; verified again here"
    ]
    assert (mine.reported(bundle), mine.metric(bundle)) == ("created here", "here")
    assert len(mine("verify", bundle, *MODEL).out.splitlines()) == 2
    shutil.copytree(bundle, "copy")
    assert mine.reported("copy") == "created here", "by content, wherever it is"


def test_trust_that_ended_vouches_for_nothing(mine: Machine, theirs: Machine, bundle: Path) -> None:
    theirs("cache", "sign", bundle, "--key", "release")
    mine("cache", "trust", "release.pub")
    assert mine.reported(bundle) == f"signed by {key_id()[:16]}, which is trusted"
    mine("cache", "trust", "--remove", "release")
    assert mine.reported(bundle) == UNKNOWN
    (bundle / "signature.json").write_text("{}")
    assert (mine.reported(bundle), mine.metric(bundle)) == (UNKNOWN, "unsigned")
    overwrite(bundle / "signature.json", bytes(2 << 20))
    assert (mine.reported(bundle), mine.metric(bundle)) == (UNKNOWN, "unsigned")


def test_without_v_nothing_is_said_and_without_an_outcome_neither(mine: Machine, toy: Path, bundle: Path) -> None:
    assert "verification" not in mine("generate", bundle, "--prompt", "a").err
    assert mine("compile", toy, *FLAGS, "--verify", "none", "-o", "plain").code == 0
    assert mine.origin("plain") == ("none", ())
    assert mine.reported("plain") == "created here", "verified since"


# Outcomes, by every way in


def read_through(mine: Machine, theirs: Machine, far: Path) -> dict[str, str]:
    assert theirs("cache", "push", far).code == 0
    return {"LLMC_REMOTE_CACHE": str(far)}


def pulled(mine: Machine, theirs: Machine, far: Path) -> dict[str, str]:
    assert theirs("cache", "push", far).code == 0
    assert mine("cache", "pull", far).code == 0
    return {}


def shared(mine: Machine, theirs: Machine, far: Path) -> dict[str, str]:
    return {"LLMC_SHARED_CACHE": str(theirs.folder / "cache")}


OUTCOMES = 8
"""Of the bundle: six buckets, greedy texts and the accuracy."""


@default_cases(1)
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("way", [read_through, pulled, shared])
def test_outcomes_from_elsewhere_are_in_the_manifest(
    mine: Machine, theirs: Machine, bundle: Path, toy: Path, tmp_path: Path, way: Callable[..., dict[str, str]],
    signed: bool,
) -> None:  # fmt: skip
    if signed:
        kinds = ("verify", "reference")
        entries = [entry.key.digest for kind in kinds for entry in theirs.store.entries(kind)]
        assert theirs("cache", "sign", *entries, "--key", "release").code == 0
        mine("cache", "trust", "release.pub")
    how = way(mine, theirs, tmp_path / "far")
    taken = mine.compile(toy, **how)
    signers = [key_id()] if signed else []
    assert taken == {"outcomes": OUTCOMES, "unsigned": 0 if signed else OUTCOMES, "signers": signers}
    if signed:
        assert mine.reported("made") == f"signed by {key_id()[:16]}, which is trusted"
        mine("cache", "trust", "--remove", "release")
        assert mine.origin("made") == ("unsigned", ())
    else:
        assert mine.reported("made") == f"{OUTCOMES} of {OUTCOMES} outcomes came from elsewhere, unsigned"
        assert mine.origin("made") == ("unsigned", ())


def test_a_compile_reports_what_it_took(
    mine: Machine, theirs: Machine, bundle: Path, toy: Path, tmp_path: Path
) -> None:
    how = read_through(mine, theirs, tmp_path / "far")
    ran = mine("compile", toy, *FLAGS, "-o", "made", **how)
    assert ran.out.splitlines()[-1] == f"from elsewhere: {OUTCOMES} of {OUTCOMES} outcomes unsigned"


def test_what_is_run_here_counts_as_built_here(
    mine: Machine, theirs: Machine, bundle: Path, toy: Path, tmp_path: Path
) -> None:
    assert theirs("cache", "push", tmp_path / "far", "--kind", "verify").code == 0
    some = [entry.key.digest for entry in theirs.store.entries("verify")[:3]]
    assert mine("cache", "pull", tmp_path / "far", *some).code == 0
    assert mine.compile(toy) == {"outcomes": OUTCOMES, "unsigned": 3, "signers": []}
    assert mine.reported("made") == f"3 of {OUTCOMES} outcomes came from elsewhere, unsigned"
    assert mine.compile(toy) == {"outcomes": OUTCOMES, "unsigned": 3, "signers": []}, "not by being used"


@full
def test_predictions_from_elsewhere_prove_nothing_here(
    mine: Machine, theirs: Machine, bundle: Path, toy: Path, tmp_path: Path
) -> None:
    assert theirs("cache", "push", tmp_path / "far", "--kind", "reference").code == 0
    assert mine("cache", "pull", tmp_path / "far").code == 0
    assert mine.compile(toy) == {"outcomes": OUTCOMES, "unsigned": OUTCOMES, "signers": []}
    assert mine.store.entries("local-reference") == []
    assert mine("verify", "made", "--json").json["recorded"]["origin"] == "unsigned"
    assert len(mine.store.entries("local-reference")) == 1, "llmc verify asks a reference of its own"
    assert mine.reported("made") == "created here"
    assert mine.compile(toy) == {}, "the outcomes were of runs here, and the predictions are now"


def test_where_signatures_are_required_outcomes_are_built_again(
    mine: Machine, theirs: Machine, bundle: Path, toy: Path, tmp_path: Path
) -> None:
    pulled(mine, theirs, tmp_path / "far")
    assert mine.compile(toy)["unsigned"] == OUTCOMES
    assert mine.compile(toy, LLMC_REQUIRE_SIGNATURES="1") == {}
    assert mine.compile(toy) == {}
    assert mine.origin("made") == ("here", ())


@full
def test_the_fact_stays_with_a_bundle_that_is_signed_and_pushed_on(
    llmc: Llmc, mine: Machine, theirs: Machine, bundle: Path, toy: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pulled(mine, theirs, tmp_path / "far")
    mine.compile(toy)
    assert mine("cache", "push", tmp_path / "farther", "made", "--key", "release").code == 0
    third = Machine(llmc, monkeypatch, tmp_path / "third")
    third("cache", "trust", "release.pub")
    assert third("cache", "pull", tmp_path / "farther", "-o", "came").code == 0
    assert third.reported("came") == f"{OUTCOMES} of {OUTCOMES} outcomes came from elsewhere, unsigned"
    assert third.origin("came") == ("unsigned", ())


# Forged, forgotten, not written


@pytest.mark.parametrize("claim", [
    {"origin": "here"}, {"elsewhere": {"outcomes": 8, "unsigned": 0, "signers": []}}, {"recorded": {"origin": "here"}},
])  # fmt: skip
def test_what_a_manifest_says_of_itself_is_not_believed(mine: Machine, bundle: Path, claim: dict[str, Any]) -> None:
    edit_manifest(bundle, lambda manifest: manifest["verification"].update(claim))
    assert mine.origin(str(bundle)) == ("unsigned", ())


@default_cases(3)
@pytest.mark.parametrize("nonsense", [None, [], "0", {}, {"unsigned": 0}, {"unsigned": True, "outcomes": 8},
                                      {"unsigned": -1, "outcomes": 8}, {"unsigned": 9, "outcomes": 8}])  # fmt: skip
def test_what_nobody_understands_vouches_for_nothing(mine: Machine, bundle: Path, nonsense: Any) -> None:
    edit_manifest(bundle, lambda manifest: manifest["verification"].update(elsewhere=nonsense))
    mine("cache", "sign", bundle, "--key", "release")
    mine("cache", "trust", "release.pub")
    assert mine.origin(str(bundle)) == ("unsigned", ())


def test_notes_do_not_come_in(mine: Machine, theirs: Machine, bundle: Path, toy: Path, tmp_path: Path) -> None:
    notes = [entry for entry in theirs.store.entries() if entry.key.kind in ("local-bundle", "local-verify")]
    assert len(notes) == 1 + OUTCOMES
    far = tmp_path / "far"
    how = read_through(mine, theirs, far)
    for note in notes:
        location = far / entry_name(note.key)
        location.parent.mkdir(exist_ok=True)
        location.write_bytes(encode_entry(note))
    assert mine("cache", "pull", far).code == 0
    assert mine.compile(toy, **how)["unsigned"] == OUTCOMES
    assert not any(entry.key in {note.key for note in notes} for entry in mine.store.entries())
    assert mine.reported(bundle) == UNKNOWN


@default_cases(1)
@pytest.mark.parametrize("harm", [Path.unlink, flip, lambda path: overwrite(path, b"")])
def test_a_note_that_is_lost_or_torn_counts_as_none_and_a_compile_makes_it_again(
    theirs: Machine, bundle: Path, toy: Path, harm: Callable[[Path], object]
) -> None:
    key = own_key(bundle_key(read_manifest(bundle)))
    harm(theirs.store.layout.entry(key.kind, key.hex))
    assert (theirs.reported(bundle), theirs.metric(bundle)) == (UNKNOWN, "unsigned")
    assert theirs.compile(toy, "bundle") == {}
    assert theirs.origin(str(bundle)) == ("here", ())


def test_outcomes_whose_notes_are_lost_count_as_unsigned(theirs: Machine, bundle: Path, toy: Path) -> None:
    for entry in theirs.store.entries("local-verify")[:2]:
        theirs.store.layout.entry(entry.key.kind, entry.key.hex).unlink()
    assert theirs.compile(toy, "again")["unsigned"] == 2


@full
def test_collecting_everything_forgets_and_says_so(theirs: Machine, bundle: Path, toy: Path) -> None:
    assert theirs("cache", "gc", "--max-age", "0s").code == 0
    assert theirs.store.entries("local-bundle") == []
    assert theirs.reported(bundle) == UNKNOWN
    assert theirs.compile(toy, "bundle") == {}, "nothing is left that could have come from elsewhere"
    assert theirs.reported(bundle) == "created here"


def test_where_no_store_can_be_written_nothing_is_claimed(mine: Machine, toy: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    nowhere = {"LLMC_CACHE_DIR": str(tmp_path / "file" / "cache")}
    assert mine.compile(toy, **nowhere) == {}, "it was all made here"
    assert mine.reported("made", **nowhere) == UNKNOWN
    assert mine("verify", "made", *MODEL, **nowhere).code == 0


@full
def test_two_compiles_at_once_take_nothing_from_each_other(toy: Path, tmp_path: Path) -> None:
    script = """
        import sys
        from llmc.cli.main import main
        sys.exit(main(sys.argv[1:]))
    """
    flags = (*FLAGS, "--cache-dir", tmp_path / "cache")
    children = [child(script, "compile", toy, *flags, "-o", tmp_path / f"made{n}") for n in range(2)]
    for one in children:
        finish(one)
    for n in range(2):
        assert "elsewhere" not in read_manifest(tmp_path / f"made{n}").verification
    assert len(Store(tmp_path / "cache").entries("local-verify")) == OUTCOMES


def test_json_has_who_signed(mine: Machine, theirs: Machine, bundle: Path) -> None:
    theirs("cache", "sign", bundle, "--key", "release")
    mine("cache", "trust", "release.pub")
    found = mine("verify", bundle, *MODEL, "--json").json
    assert found["recorded"] == {"origin": "signed", "signers": [key_id()]}
    assert json.loads(mine("cache", "show", bundle, "--json").out) == read_manifest(bundle).to_dict()
