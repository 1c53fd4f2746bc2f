from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.digest import Blob, digest_bytes
from llmc.artifacts.oci.image import MAX_LAYERS, MAX_OWN, OWN_FROM, Layer, split

SIZES = st.integers(0, 1 << 40) | st.integers(0, OWN_FROM) | st.just(OWN_FROM)
BLOBS = st.dictionaries(st.integers().map(lambda number: digest_bytes(str(number).encode())), SIZES, max_size=300)


def names(layers: list[Layer]) -> list[tuple[str, ...]]:
    return [tuple(blob.digest for blob in layer.blobs) for layer in layers]


@given(BLOBS)
def test_every_blob_is_in_one_layer_and_there_are_never_too_many(blobs: dict[str, int]) -> None:
    layers = split(blobs)
    assert sorted(blob for layer in layers for blob in layer.blobs) == sorted(Blob(*item) for item in blobs.items())
    assert len(layers) < MAX_LAYERS
    assert all(layer.blobs for layer in layers)


@given(BLOBS, st.data())
def test_layers_do_not_depend_on_the_order_of_the_manifest(blobs: dict[str, int], choose: st.DataObject) -> None:
    shuffled = dict(choose.draw(st.permutations(list(blobs.items()))))
    assert split(shuffled) == split(blobs)


@given(st.dictionaries(st.integers(0, 999).map(lambda n: digest_bytes(b"%d" % n)), st.integers(0, OWN_FROM - 1)))
def test_one_more_small_blob_changes_one_layer(blobs: dict[str, int]) -> None:
    before = set(names(split(blobs)))
    after = set(names(split({**blobs, digest_bytes(b"new"): 5})))
    assert len(after - before) == 1 and len(before - after) <= 1


@given(BLOBS)
def test_big_blobs_come_first_each_alone_the_largest_first(blobs: dict[str, int]) -> None:
    big = sorted((size for size in blobs.values() if size >= OWN_FROM), reverse=True)
    if len(big) <= MAX_OWN:
        assert [layer.blobs[0].size for layer in split(blobs)[: len(big)]] == big
        assert all(len(layer.blobs) == 1 for layer in split(blobs)[: len(big)])


def test_the_size_of_a_layer_is_that_of_its_bytes() -> None:
    contents = {digest_bytes(data): data for data in (b"", b"a" * 511, b"b" * 512, b"c" * 513)}
    for layer in split({digest: len(data) for digest, data in contents.items()}):
        assert layer.size == len(b"".join(layer.write(lambda blob: [contents[blob.digest]])))


def test_too_many_blobs_of_one_size_share_groups() -> None:
    blobs = {digest_bytes(b"%d" % number): 5 << 20 for number in range(MAX_OWN + 1)}
    assert len(split(blobs)) <= 16
