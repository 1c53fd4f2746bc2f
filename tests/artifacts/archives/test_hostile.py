"""What an archive may try on who imports it (P13): each attempt is one clear error, and leaves nothing to be seen."""

from __future__ import annotations

import tarfile
import unicodedata
from typing import Any

import pytest

from llmc.artifacts.archives.format import BLOCK, END, blob_name, entry_name, header
from llmc.artifacts.bundle.manifest_schema import FILE_NAME, checksum_line
from llmc.artifacts.bundle.stored import bundle_key, bundle_outputs
from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.store.entries import Entry, encode_entry
from llmc.artifacts.store.store import Store
from llmc.errors import ArtifactError
from tests.artifacts.archives.helpers import blob_members, head, import_bytes, member, refused, sound
from tests.artifacts.helpers import CONTENT, DIGESTS, key, manifest

SOUND = sound()
HEAD = head(manifest())
BLOBS = blob_members()


def tar(*members: tuple[dict[str, Any], bytes], form: int = tarfile.USTAR_FORMAT) -> bytes:
    """Members as tarfile writes them, before the blobs of an archive that is sound otherwise."""
    made = b""
    for fields, content in members:
        info = tarfile.TarInfo()
        info.mode = 0o444
        for name, value in {"size": len(content), **fields}.items():
            setattr(info, name, value)
        made += info.tobuf(form) + content + bytes(-len(content) % BLOCK)
    return made


LINKS = {
    tarfile.SYMTYPE: "symbolic link",
    tarfile.LNKTYPE: "hard link",
    tarfile.CHRTYPE: "device",
    tarfile.BLKTYPE: "device",
    tarfile.FIFOTYPE: "fifo",
    tarfile.DIRTYPE: "folder",
    tarfile.GNUTYPE_SPARSE: "sparse file",
    tarfile.CONTTYPE: "more than a name and a size",
    tarfile.AREGTYPE: "more than a name and a size",
}


@pytest.mark.parametrize("kind", LINKS, ids=lambda kind: LINKS[kind] + kind.hex())
@pytest.mark.parametrize("name", ["manifest.json", blob_name(DIGESTS["weights"]), "evil"])
def test_only_regular_files(store: Store, kind: bytes, name: str) -> None:
    evil = tar(({"name": name, "type": kind, "linkname": "/etc/passwd"}, b""))
    for data in (evil + END, evil + SOUND, HEAD + evil + b"".join(BLOBS) + END):
        assert LINKS[kind] in refused(store, data)


PATHS = [
    "/etc/passwd", "../evil", "blobs/sha256/../../../evil", "./manifest.json", "blobs//sha256/" + "0" * 64, "evil",
    "MANIFEST.JSON", "Manifest.json", "manifest.json ", "manifest.json/", "blobs\\sha256\\x", "~/evil", "$HOME/evil",
    blob_name(DIGESTS["weights"]).upper(), blob_name(DIGESTS["weights"]) + ".json", ".stamps.json",
    "entries/executable/../../" + "0" * 64 + ".json", "entries/../" + "0" * 64 + ".json", "entries/" + "x" * 80,
]  # fmt: skip


def test_a_signature_that_is_none(store: Store) -> None:
    with pytest.raises(ArtifactError, match="not of this content"):
        import_bytes(store, HEAD + member("signature.json", b"evil") + b"".join(BLOBS) + END)


@pytest.mark.parametrize("path", PATHS)
def test_no_name_but_those_of_the_format(store: Store, path: str) -> None:
    evil = member(path, b"evil")
    for data in (evil + END, evil + SOUND, HEAD + evil + b"".join(BLOBS) + END, HEAD + b"".join(BLOBS) + evil + END):
        refused(store, data)


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_no_name_in_another_normalisation(store: Store, form: Any) -> None:
    name = unicodedata.normalize(form, "manifést.json")
    assert "not an archive" in refused(store, tar(({"name": name}, b"x")) + SOUND)
    assert "not a tar header" in refused(store, HEAD + tar(({"name": name}, b"x")) + b"".join(BLOBS) + END)


def test_no_extension_header_is_believed(store: Store) -> None:
    """PAX headers that override path or size, global ones, and GNU's long names."""
    content = manifest().to_bytes()
    for pax in ({"path": "../evil"}, {"size": "5"}, {"linkpath": "/etc"}, {"GNU.sparse.realsize": "9" * 12}):
        info = tarfile.TarInfo(FILE_NAME)
        info.size, info.mode, info.pax_headers = len(content), 0o444, pax
        evil = info.tobuf(tarfile.PAX_FORMAT) + content
        assert "PAX" in refused(store, evil + SOUND)
        assert "PAX" in refused(store, HEAD + evil + END)
    globally = tarfile.TarInfo.create_pax_global_header({"path": "../evil"})
    assert "PAX" in refused(store, globally + SOUND)
    long = tar(({"name": "d/" * 200 + "evil"}, b"x"), form=tarfile.GNU_FORMAT)
    assert "GNU long name" in refused(store, long + SOUND)
    link = tar(({"name": "x", "type": tarfile.SYMTYPE, "linkname": "l" * 200}, b""), form=tarfile.GNU_FORMAT)
    assert "GNU long link" in refused(store, link + SOUND)


@pytest.mark.parametrize(
    "fields",
    [{"mode": 0o4755}, {"mode": 0o644}, {"uid": 1000}, {"mtime": 1}, {"uname": "root"}, {"linkname": "/etc"}],
    ids=str,
)
def test_a_header_says_a_name_and_a_size_only(store: Store, fields: dict[str, Any]) -> None:
    evil = tar(({"name": FILE_NAME, **fields}, manifest().to_bytes()))
    assert "more than a name and a size" in refused(store, evil + SOUND)


def test_no_member_twice(store: Store) -> None:
    for twice in (
        HEAD + HEAD + b"".join(BLOBS),
        HEAD + BLOBS[0] + BLOBS[0] + b"".join(BLOBS[1:]),
        SOUND[: -len(END)] * 2,
    ):
        refused(store, twice + END)
    entry = encode_entry(Entry(key(), {}, {}, 0.0, 0.0))
    name = entry_name(key())
    assert "there twice" in refused(store, member(name, entry) * 2 + END)


def test_no_member_missing_and_none_out_of_order(store: Store) -> None:
    for gone in range(len(BLOBS)):
        assert "is missing" in refused(store, HEAD + b"".join(BLOBS[:gone] + BLOBS[gone + 1 :]) + END)
    assert "is missing" in refused(store, HEAD + b"".join(reversed(BLOBS)) + END)
    assert "named by nothing" in refused(store, b"".join(BLOBS) + HEAD + END)


def test_no_blob_that_nothing_names(store: Store) -> None:
    extra = member("blobs/sha256/" + "f" * 64, b"unnamed")
    assert "named by nothing" in refused(store, HEAD + b"".join(BLOBS) + extra + END)
    assert "named by nothing" in refused(store, extra + END)


def test_no_blob_of_another_size_than_announced(store: Store) -> None:
    first = min(CONTENT, key=DIGESTS.__getitem__)
    for size in (len(CONTENT[first]) - 1, len(CONTENT[first]) + 1, 1 << 45, (1 << 64) - 1):
        data = HEAD + header(blob_name(DIGESTS[first]), size) + CONTENT[first]
        assert "are announced" in refused(store, data + bytes(BLOCK * 8) + END)


def test_no_blob_under_a_name_that_is_not_its_own(store: Store) -> None:
    first = min(CONTENT, key=DIGESTS.__getitem__)
    wrong = member(blob_name(DIGESTS[first]), bytes(len(CONTENT[first])))
    assert "is damaged: its content has digest" in refused(store, HEAD + wrong + b"".join(BLOBS[1:]) + END)
    assert not store.layout.blob(DIGESTS[first]).exists()


@pytest.mark.parametrize(("old", "new"), [(b'"schema": 1', b'"schema": 9'), (b"{", b"["), (b"sha256:", b"../../")])
def test_a_manifest_that_is_not_one(store: Store, old: bytes, new: bytes) -> None:
    content = manifest().to_bytes().replace(old, new)
    line = checksum_line(digest_bytes(content))
    with pytest.raises(ArtifactError):
        import_bytes(store, member(FILE_NAME, content) + member("manifest.sha256", line) + b"".join(BLOBS) + END)


def test_a_manifest_in_another_spelling(store: Store) -> None:
    content = manifest().to_bytes().replace(b"\n", b"\r\n")
    line = checksum_line(digest_bytes(content))
    data = member(FILE_NAME, content) + member("manifest.sha256", line) + b"".join(BLOBS) + END
    assert "not written as llmc writes it" in refused(store, data)
    assert "not what manifest.sha256 says" in refused(store, data.replace(line, checksum_line(DIGESTS["decode"])))


def entries_archive(*found: tuple[str, bytes], blobs: tuple[bytes, ...] = ()) -> bytes:
    return b"".join(member(name, data) for name, data in found) + b"".join(blobs) + END


def test_entries_that_are_not_what_they_say(store: Store) -> None:
    entry = Entry(key(), {"a": store.put_bytes(b"a")}, {}, 0.0, 0.0)
    data, name = encode_entry(entry), entry_name(key())
    blob = member(blob_name(digest_bytes(b"a")), b"a")
    assert "is not an entry" in refused(store, entries_archive((name, data[:-1]), blobs=(blob,)))
    assert "is not an entry" in refused(
        store, entries_archive((name, data.replace(b"decode", b"prefil")), blobs=(blob,))
    )
    assert "of another key" in refused(store, entries_archive((entry_name(key(batch=5)), data), blobs=(blob,)))
    assert "is missing" in refused(store, entries_archive((name, data)))
    local = Entry(key("local-bench"), {}, {}, 0.0, 0.0)
    assert "made on only" in refused(store, entries_archive((entry_name(local.key), encode_entry(local))))
    lying = Entry(key(batch=5), {"a": entry.outputs["a"]._replace(size=2)}, {}, 0.0, 0.0)
    both = sorted((entry_name(item.key), encode_entry(item)) for item in (entry, lying))
    assert "disagree on the size" in refused(store, entries_archive(*both, blobs=(blob,)))


def test_a_bundles_entry_that_does_not_agree_with_its_manifest(store: Store) -> None:
    outputs = bundle_outputs(manifest(), None)
    other = manifest(target="other")
    for wrong in ({**outputs, "extra": outputs[FILE_NAME]}, bundle_outputs(other, None), {}):
        entry = Entry(bundle_key(manifest()), wrong, {}, 0.0, 0.0)
        contents = [*CONTENT.values(), manifest().to_bytes(), other.to_bytes()]
        named = {blob.digest for blob in wrong.values()}
        parts = {blob_name(digest_bytes(c)): c for c in contents if digest_bytes(c) in named}
        blobs = tuple(member(name, content) for name, content in sorted(parts.items()))
        with pytest.raises(ArtifactError, match=r"not agree|not a bundle"):
            import_bytes(store, entries_archive((entry_name(entry.key), encode_entry(entry)), blobs=blobs))
