"""A certificate is believed only where it is signed, whole, of this bundle and of this place, and says it of itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.signing.keyring import Keyring
from llmc.errors import ArtifactError, LlmcError, VerificationError
from llmc.runtime.bundle import Bundle
from llmc.runtime.certificate import checking, document
from llmc.runtime.certificate.checking import Checked, check
from llmc.runtime.certificate.document import Certificate, content, read_file, to_file
from llmc.runtime.executors.fake import device
from tests.artifacts.signing.helpers import keyring, signer
from tests.hostile import as_json, changed
from tests.tiers import examples
from tests.toy import Toy

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def bundle(toys: dict[str, Toy]) -> Bundle:
    return Bundle.open(toys["static"].bundle)


@pytest.fixture
def nobody(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path / "nobody")


def written(tmp_path: Path, members: dict[str, Any], signature: bytes | None = None) -> Path:
    file = tmp_path / "certificate.json"
    file.write_bytes(to_file(members, signature))
    return file


def believed(tmp_path: Path, built: Certificate, bundle: Bundle, edit: Edit = lambda _: None) -> Checked:
    """What is said of the certificate after an edit, where nobody has to sign."""
    members = built.to_dict()
    edit(members)
    return check(written(tmp_path, members), bundle, Keyring(tmp_path / "nobody"), allow_unsigned=True)


# Sound


def test_a_certificate_is_read_as_it_was_built(tmp_path: Path, certified: Certificate) -> None:
    read, signed, signature = read_file(written(tmp_path, certified.to_dict()))
    assert read == certified
    assert signed == content(certified.to_dict())
    assert signature is None


def test_a_signed_one_is_believed_and_says_by_whom(tmp_path: Path, certified: Certificate, bundle: Bundle) -> None:
    one = signer(tmp_path, 1)
    file = written(tmp_path, certified.to_dict(), one.sign(content(certified.to_dict())))
    found = check(file, bundle, keyring(tmp_path / "trusted", one))
    assert found.signer is not None
    assert found.signer[1] == one.public.id
    assert found.to_dict()["compilations"] == 0


def test_the_layout_of_the_file_is_not_signed(tmp_path: Path, certified: Certificate, bundle: Bundle) -> None:
    one = signer(tmp_path, 1)
    file = written(tmp_path, certified.to_dict(), one.sign(content(certified.to_dict())))
    file.write_text(json.dumps(json.loads(file.read_text()), sort_keys=True))
    assert check(file, bundle, keyring(tmp_path / "trusted", one)).signer is not None


# Signatures


def test_an_unsigned_one_is_believed_only_where_that_is_allowed(
    tmp_path: Path, certified: Certificate, bundle: Bundle, nobody: Keyring
) -> None:
    file = written(tmp_path, certified.to_dict())
    with pytest.raises(UntrustedError, match=r"is not signed; .*--sign KEY.*--allow-unsigned"):
        check(file, bundle, nobody)
    assert check(file, bundle, nobody, allow_unsigned=True).signer is None
    strict = Keyring(tmp_path / "nobody", require_signatures=True)
    with pytest.raises(UntrustedError, match="LLMC_REQUIRE_SIGNATURES"):
        check(file, bundle, strict, allow_unsigned=True)


def test_a_signature_of_a_stranger_is_none(tmp_path: Path, certified: Certificate, bundle: Bundle) -> None:
    file = written(tmp_path, certified.to_dict(), signer(tmp_path, 1).sign(content(certified.to_dict())))
    with pytest.raises(UntrustedError, match="not signed by a key that is trusted here"):
        check(file, bundle, keyring(tmp_path / "trusted", signer(tmp_path, 2)))


def test_what_was_changed_after_it_was_signed_is_refused_whatever_is_allowed(
    tmp_path: Path, certified: Certificate, bundle: Bundle
) -> None:
    one = signer(tmp_path, 1)
    members = certified.to_dict()
    signature = one.sign(content(members))
    members["requests"]["count"] += 1
    members["requests"]["kinds"]["greedy"] += 1
    with pytest.raises(UntrustedError, match="signs other content"):
        check(written(tmp_path, members, signature), bundle, keyring(tmp_path / "trusted", one), allow_unsigned=True)


def test_the_signature_of_its_bundle_is_not_its_own(tmp_path: Path, certified: Certificate, bundle: Bundle) -> None:
    one = signer(tmp_path, 1)
    file = written(tmp_path, certified.to_dict(), one.sign(bundle.manifest.to_bytes()))
    with pytest.raises(UntrustedError, match="signs other content"):
        check(file, bundle, keyring(tmp_path / "trusted", one))


def test_a_certificate_vouches_for_no_bundle(tmp_path: Path, certified: Certificate, bundle: Bundle) -> None:
    one = signer(tmp_path, 1)
    signature = one.sign(content(certified.to_dict()))
    with pytest.raises(UntrustedError, match="signs other content"):
        keyring(tmp_path / "trusted", one).require(bundle.manifest.to_bytes(), signature, native=True, origin="bundle")


# Of another bundle, from another place


def test_one_of_another_bundle_is_refused(tmp_path: Path, certified: Certificate, toys: dict[str, Toy]) -> None:
    with pytest.raises(ArtifactError, match="of another bundle, sha256:"):
        believed(tmp_path, certified, Bundle.open(toys["exact"].bundle))


def test_a_copy_of_its_bundle_is_its_bundle(tmp_path: Path, certified: Certificate, bundle: Bundle) -> None:
    import shutil

    copied = Bundle.open(shutil.copytree(bundle.path, tmp_path / "copy"))
    assert believed(tmp_path, certified, copied).certificate == certified


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda m: m["plan"]["limits"].update(max_num_seqs=99), "another plan"),
        (lambda m: m["executables"].pop(), "another executables"),
        (lambda m: m["executables"][0].update(blob="sha256:" + "0" * 64), "another executables"),
        (lambda m: m["buckets"].pop(), "another buckets"),
        (lambda m: m["buckets"].append(m["buckets"][0]), "another buckets"),
        (lambda m: m.update(device="hpu"), "another device"),
        (lambda m: m.update(verification=None), "another verification"),
    ],
)
def test_what_it_says_of_its_bundle_has_to_be_so(
    tmp_path: Path, certified: Certificate, bundle: Bundle, edit: Edit, words: str
) -> None:
    with pytest.raises(ArtifactError, match=words):
        believed(tmp_path, certified, bundle, edit)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda m: m["toolchain"].update(numpy="0.1"), r"numpy 0\.1, here \d"),
        (lambda m: m["toolchain"].update(libneuronxla="2.2"), r"libneuronxla 2\.2, here none"),
        (lambda m: m["host"].update(machine="sparc"), "machine sparc, here"),
        (lambda m: m["host"].update(features=["sparc"]), "instruction sets sparc, here"),
    ],
)
def test_one_of_another_device_or_toolchain_is_refused(
    tmp_path: Path, certified: Certificate, bundle: Bundle, edit: Edit, words: str
) -> None:
    with pytest.raises(ArtifactError, match=f"made on another device or toolchain: {words}"):
        believed(tmp_path, certified, bundle, edit)


def test_one_of_another_accelerator_or_driver_is_refused(
    tmp_path: Path, certified: Certificate, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reported(members: dict[str, Any]) -> None:
        members["accelerator"] = {"gpu": "fake-1", "driver": "1.0"}

    with pytest.raises(ArtifactError, match=r"driver 1\.0, here none; gpu fake-1, here none"):
        believed(tmp_path, certified, bundle, reported)
    monkeypatch.setattr(device, "here", device.FakeGpu(driver="2.0"))
    with pytest.raises(ArtifactError, match=r"toolchain: driver 1\.0, here 2\.0; certify here"):
        believed(tmp_path, certified, bundle, reported)
    with pytest.raises(ArtifactError, match="gpu none, here fake-1"):
        believed(tmp_path, certified, bundle)


# What certifies nothing


def monitor(members: dict[str, Any], name: str = "executables") -> dict[str, Any]:
    found: dict[str, Any] = next(w for w in members["monitors"] if w["monitor"] == name)
    return found


def compiled(members: dict[str, Any]) -> None:
    monitor(members)["after"] = {"count": 2, "names": ["late"]}
    members["compilations"] = 2


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (compiled, r"executables saw 2 \(late\)"),
        (lambda m: monitor(m)["after"].update(names=["late"]), "executables counts 0 and names 1"),
        (lambda m: monitor(m)["before"].update(names=["a", "b"]), "executables counts 0 and names 2"),
        (lambda m: monitor(m)["after"].update(count=None), "does not say what it saw, nor why"),
        (lambda m: m["monitors"].pop(), "no report from executables"),
        (lambda m: m["monitors"].append(m["monitors"][0]), "reports twice"),
        (lambda m: m["buckets"][0].update(replays=0, steps=0), "1 of 11 buckets never ran"),
        (lambda m: m["executables"][0].update(replays=0, steps=0), "1 of 11 executables never ran"),
        (lambda m: m["buckets"][0].update(steps=10**6), "count different steps"),
        (lambda m: m["requests"].update(count=10**6), "not all of its 1000000 requests ended"),
        (lambda m: m["requests"]["finished"].update(error=1), "ended with an error"),
        (lambda m: m["requests"].update(count=0, kinds={}), "no request ran"),
    ],
)
def test_a_certificate_that_is_incomplete_or_contradicts_itself_certifies_nothing(
    tmp_path: Path, certified: Certificate, bundle: Bundle, edit: Edit, words: str
) -> None:
    with pytest.raises(VerificationError, match=f"{words}.*: it certifies nothing"):
        believed(tmp_path, certified, bundle, edit)


def test_a_blind_monitor_is_reported_and_is_no_contradiction(
    tmp_path: Path, certified: Certificate, bundle: Bundle
) -> None:
    def blind(members: dict[str, Any]) -> None:
        own = monitor(members, "files in compile caches")
        own["after"]["count"], own["blind"] = None, "a cache cannot be read"

    found = believed(tmp_path, certified, bundle, blind)
    assert found.to_dict()["blind"] == {"files in compile caches": "a cache cannot be read"}


# Hostile files


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda m: m.update(kind="llmc-bundle"), "its kind is not"),
        (lambda m: m.update(schema=1), "schema 1, and this llmc reads schema 3"),
        (lambda m: m.update(compilations=-1), "compilations is -1"),
        (lambda m: m.update(compilations=3), "it says 3 compilations, its monitors 0"),
        (lambda m: m.update(extra=1), "'extra' is unknown"),
        (lambda m: m["requests"].update(seed=True), "must be an integer"),
        (lambda m: m.pop("buckets"), "'buckets' is missing"),
        (lambda m: m.update(any_shape=1), "neither true nor false"),
        (lambda m: m["host"].update(features=[1]), "something else than texts"),
        (lambda m: m["seconds"].update(requests="1"), "must be a finite number"),
    ],
)
def test_what_is_no_certificate_is_refused(
    tmp_path: Path, certified: Certificate, bundle: Bundle, edit: Edit, words: str
) -> None:
    with pytest.raises(ArtifactError, match=f"not a certificate: .*{words}"):
        believed(tmp_path, certified, bundle, edit)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not valid JSON"),
        (b"{}", "not an object of"),
        (b'{"certificate": {}, "signature": null, "certificate": {}}', "occurs twice"),
        (b'{"certificate": {}, "signature": 1}', "signature is not an object"),
        (b'{"certificate": [], "signature": null}', "must be an object"),
        (b'{"certificate": NaN, "signature": null}', "not a JSON number"),
        (b'{"certificate": ' + b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_a_file_that_is_none_is_refused(
    tmp_path: Path, bundle: Bundle, nobody: Keyring, data: bytes, words: str
) -> None:
    file = tmp_path / "certificate.json"
    file.write_bytes(data)
    with pytest.raises(ArtifactError, match=words):
        check(file, bundle, nobody, allow_unsigned=True)


def test_a_file_that_is_cut_huge_missing_or_a_pipe_is_refused(
    tmp_path: Path, certified: Certificate, bundle: Bundle, nobody: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    file = written(tmp_path, certified.to_dict())
    whole = file.read_bytes()
    for end in range(0, len(whole) - 2, 97):
        file.write_bytes(whole[:end])
        with pytest.raises(ArtifactError, match="not a certificate"):
            check(file, bundle, nobody, allow_unsigned=True)
    monkeypatch.setattr(document, "MAX_BYTES", 100)
    file.write_bytes(whole)
    with pytest.raises(ArtifactError, match="larger than 100 bytes"):
        check(file, bundle, nobody, allow_unsigned=True)
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing"):
        with pytest.raises(ArtifactError, match="cannot be read"):
            check(tmp_path / name, bundle, nobody, allow_unsigned=True)


@examples(80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_changed_is_refused_or_still_consistent(
    tmp_path: Path, certified: Certificate, bundle: Bundle, data: st.DataObject
) -> None:
    members = data.draw(changed(copy.deepcopy(certified.to_dict())))
    file = tmp_path / "certificate.json"
    file.write_bytes(b'{"certificate": ' + as_json(members) + b', "signature": null}')
    try:
        found = check(file, bundle, Keyring(tmp_path / "nobody"), allow_unsigned=True)
    except LlmcError as error:
        assert error.exit_code in (4, 5)
    else:
        assert found.certificate.compilations == 0
        assert list(checking._problems(found.certificate)) == []
