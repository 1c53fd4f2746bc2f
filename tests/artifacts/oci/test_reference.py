from __future__ import annotations

from pathlib import Path

import pytest

from llmc.artifacts.oci import is_reference, parse_reference
from llmc.errors import InputError

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "host", "name", "tag", "digest"),
    [
        ("oci://registry.example/team/llama:v1", "registry.example", "team/llama", "v1", None),
        ("oci://registry.example:5000/llama", "registry.example:5000", "llama", None, None),
        (f"oci://[::1]:5000/llama@{DIGEST}", "[::1]:5000", "llama", None, DIGEST),
        (f"oci://host/a/b:v1@{DIGEST}", "host", "a/b", None, DIGEST),
    ],
)
def test_a_registrys_image_is_taken_apart(text: str, host: str, name: str, tag: str | None, digest: str | None) -> None:
    found = parse_reference(text)
    assert (found.host, found.name, found.tag, found.digest, found.folder) == (host, name, tag, digest, None)


@pytest.mark.parametrize(
    ("text", "folder", "tag", "digest"),
    [
        ("oci-layout:images", "images", None, None),
        ("oci-layout:/data/images:v1.0", "/data/images", "v1.0", None),
        ("oci-layout:/data/a:b/images", "/data/a:b/images", None, None),
        (f"oci-layout:./images@{DIGEST}", "images", None, DIGEST),
    ],
)
def test_a_layouts_image_is_taken_apart(text: str, folder: str, tag: str | None, digest: str | None) -> None:
    found = parse_reference(text)
    assert (found.folder, found.tag, found.digest, found.host) == (Path(folder), tag, digest, None)
    assert is_reference(text)


@pytest.mark.parametrize(
    "text",
    ["oci://", "oci://host", "oci://host/", "oci://host/UPPER", "oci://host/a//b", "oci://host/../b", "oci://ho st/a",
     "oci://host/a:bad tag", "oci://host/a?x=1", "oci://host:port/a", "oci://host/a@sha256:12", "oci-layout:",
     "oci-layout::v1", f"oci://host/{'a' * 300}", "s3://bucket/x", "docker://host/a"],
)  # fmt: skip
def test_what_names_no_image_is_a_usage_error(text: str) -> None:
    with pytest.raises(InputError):
        parse_reference(text)


@pytest.mark.parametrize(
    "text", ["oci://me:s3cret@host/a:v1", "oci://me:s3/cret@host/a", f"oci://me:s3cret@host/a@{DIGEST}"]
)
def test_credentials_in_a_name_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(InputError, match="docker login") as caught:
        parse_reference(text)
    assert "s3" not in str(caught.value).replace("sha256", "")


@pytest.mark.parametrize("host", ["localhost", "localhost:5000", "127.0.0.1:5000", "127.9.8.7", "[::1]", "[::1]:1"])
def test_only_this_machine_is_spoken_to_in_plain_http(host: str) -> None:
    assert parse_reference(f"oci://{host}/a").plain_http


@pytest.mark.parametrize("host", ["127.0.0.1.example", "localhost.example:5000", "10.0.0.1", "[::2]", "128.0.0.1"])
def test_other_hosts_are_spoken_to_in_https(host: str) -> None:
    assert not parse_reference(f"oci://{host}/a").plain_http
