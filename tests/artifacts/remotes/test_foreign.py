"""Packed caches of other servers through remotes of every sort: whole, and only for those who trust them."""

from __future__ import annotations

from pathlib import Path

from llmc.artifacts.remotes.base import Remote
from llmc.artifacts.remotes.transfer import pull, push
from llmc.artifacts.store.store import Store
from llmc.artifacts.third_party.contents import KIND, read_contents
from llmc.artifacts.third_party.packing import pack, unpack
from llmc.integrations import compile_cache
from tests.artifacts.remotes.helpers import FakeSigner, FakeTrust
from tests.artifacts.third_party.helpers import content, make_vllm
from tests.tiers import default_cases


@default_cases(2)
def test_a_cache_goes_to_every_remote_and_back_if_it_is_signed(
    store: Store, other: Store, remote: Remote, tmp_path: Path
) -> None:
    source = make_vllm(tmp_path / "source")
    done = pack(store, compile_cache("vllm"), source)
    push(store, [done.entry], remote)
    (refused,) = pull(other, remote, trust=FakeTrust("alice")).refused
    assert "not signed" in refused.reason and other.entries() == [] and other.usage().blobs == 0
    push(store, [done.entry], remote, signer=FakeSigner())
    assert pull(other, remote, trust=FakeTrust("bob")).entries == 0
    assert pull(other, remote, trust=FakeTrust("alice"), kind=KIND).entries == 1
    found = other.lookup(done.entry.key, verify=True)
    assert found is not None and found.signature is not None
    unpack(other, compile_cache("vllm"), read_contents(found, ""), tmp_path / "place")
    expected = {path: value for path, value in content(source).items() if path in done.contents.files}
    assert content(tmp_path / "place") == expected
