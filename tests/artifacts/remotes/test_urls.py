"""Nothing secret in a URL is ever shown."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.remotes.base import address
from llmc.artifacts.remotes.fsspec_remote import FsspecRemote
from llmc.artifacts.remotes.retry import Patience
from llmc.errors import InputError

secrets = st.text(string.ascii_letters + string.digits + "-_.~%!$&*+,;=", min_size=6, max_size=30).map(
    lambda text: f"S{text}"
)


@given(secrets, secrets, st.sampled_from(["s3", "sftp", "https", "webdav"]))
def test_a_login_is_not_shown(user: str, password: str, scheme: str) -> None:
    location = address(f"{scheme}://{user}:{password}@host/folder/")
    assert location.shown == f"{scheme}://host/folder"
    message = location.clean(f"cannot open {scheme}://{user}:{password}@host for {user} with {password}")
    for secret in (user, password):
        assert secret not in repr(location)
        assert f"{secret}@" not in message
    assert password not in message


def test_a_query_is_not_shown() -> None:
    location = address("https://host/folder?sig=abcdef&se=2030")
    assert location.shown == "https://host/folder"
    assert "abcdef" not in location.clean("GET /folder?sig=abcdef&se=2030")
    assert "xyz" not in location.clean("GET /other?X-Amz-Signature=xyz&a=1")
    assert "xyz" not in location.clean("Authorization: Bearer xyz")
    assert "me:pw" not in location.clean("proxy http://me:pw@proxy:3128 refused")


def test_a_message_is_one_line() -> None:
    assert address("s3://bucket").clean("one\n  two") == "one two"


@pytest.mark.parametrize(("url", "scheme"), [("./folder", ""), ("/folder", ""), ("C:\\x", ""), ("file:///x", "file")])
def test_paths_have_no_scheme(url: str, scheme: str) -> None:
    assert address(url).scheme == scheme


@pytest.mark.parametrize("url", ["oci:images", "oci:/images:v1", "s3:bucket/folder", "s3:", "memory:x?key=hush"])
def test_a_scheme_without_slashes_is_no_folder_s_name(url: str) -> None:
    with pytest.raises(
        InputError, match=r"write (oci|s3|memory)://LOCATION/FOLDER, oci-layout:FOLDER for images"
    ) as found:
        address(url)
    assert "hush" not in str(found.value)
    assert address(f"./{url}").scheme == "" and address("simplecache::s3://b/x").scheme == "simplecache"


def test_a_url_that_cannot_be_read_is_not_shown() -> None:
    with pytest.raises(InputError) as caught:
        address("s3://key:secret@[bad/bucket")
    assert "secret" not in str(caught.value)


def test_a_login_of_s3_is_used_and_not_shown() -> None:
    remote = FsspecRemote(address("s3://KEYID:se%2Fcret@bucket/folder"), Patience())
    assert (remote._fs.key, remote._fs.secret, remote._base) == ("KEYID", "se/cret", "bucket/folder")
    assert remote.url == "s3://bucket/folder"
    assert "cret" not in repr(remote)
