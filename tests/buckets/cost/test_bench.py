"""Bench files: their format, what reading refuses, and what seconds are given to shapes that nobody measured."""

from __future__ import annotations

import json
import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost import surface
from llmc.buckets.cost.bench import Bench, Measurement
from llmc.buckets.cost.surface import _non_negative_least_squares, _terms
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(0, 40))


def bench_of(rows: dict[tuple[int, int, int], float], phase: str = "prompt") -> Bench:
    return Bench("test device", tuple(Measurement(Bucket(phase, *shape), seconds) for shape, seconds in rows.items()))


@st.composite
def benches(draw: st.DrawFn) -> Bench:
    """Scattered measurements of both phases, with any noise."""
    rows = draw(st.dictionaries(SIZES, st.floats(1e-4, 10), min_size=1, max_size=12))
    phase = draw(st.sampled_from(["prompt", "decode"]))
    if phase == "decode":
        rows = {(batch, 1, context): seconds for (batch, _, context), seconds in rows.items()}
    return bench_of(rows, phase)


@pytest.fixture(params=["grid", "bounds"])
def either_rule(request, monkeypatch):
    """The rule for measurements that span a small grid, and the one for any others."""
    if request.param == "bounds":
        monkeypatch.setattr(surface, "MAX_NODES", 0)


@pytest.fixture(scope="module")
def shapes() -> np.ndarray:
    """Shapes in and around the box that the measurements of `benches` are in."""
    return np.array(list(product((1, 2, 5, 6, 9), (1, 2, 7, 20, 39, 40, 64), (0, 1, 2, 9, 30, 40, 55))))


def decode_truth(batch: float, context: float) -> float:
    return 0.008 + 0.0001 * batch + 6e-8 * batch * context


def prompt_truth(batch: float, query: float, context: float) -> float:
    return 0.005 + 8e-5 * batch * query + 2e-8 * batch * query * (query / 2 + context)


# the file


def document(**changes: object) -> str:
    first = {"phase": "prompt", "batch": 1, "query": 128, "context": 0, "seconds": 0.01, "samples": 5}
    second = {"phase": "decode", "batch": 4, "query": 1, "context": 512, "seconds": 1e-3, "memory_bytes": 7}
    fields = {"schema": 1, "device": "cpu", "measurements": [first | {"compile_seconds": 2}, second]}
    for path, value in changes.items():
        index = fields["measurements"][0] if path.startswith("m_") else fields
        if value is None:
            del index[path.removeprefix("m_")]
        else:
            index[path.removeprefix("m_")] = value
    return json.dumps(fields)


def test_a_bench_holds_what_was_measured():
    bench = Bench.from_json(document(bundle="abc", toolchain={"ort": "1.31"}))
    assert (bench.device, bench.bundle, bench.more) == ("cpu", "abc", {"toolchain": {"ort": "1.31"}})
    assert bench.measured("prompt") == (Measurement(Bucket("prompt", 1, 128, 0), 0.01, 2.0, None, 5),)
    assert bench.measured("decode") == (Measurement(Bucket("decode", 4, 1, 512), 0.001, None, 7),)


def test_the_text_is_canonical():
    text = Bench.from_json(document(host="h", m_compile_seconds=None)).to_json()
    assert text == (
        '{\n"schema": 1,\n"device": "cpu",\n"host": "h",\n"measurements": [\n'
        '{"phase": "decode", "batch": 4, "query": 1, "context": 512, "seconds": 0.001, "memory_bytes": 7},\n'
        '{"phase": "prompt", "batch": 1, "query": 128, "context": 0, "seconds": 0.01, "samples": 5}\n]\n}\n'
    )


@PROPERTY
@given(benches())
def test_json_round_trip(bench):
    again = Bench.from_json(bench.to_json())
    assert again == bench
    assert again.to_json() == bench.to_json()
    assert again.digest() == bench.digest()
    assert hash(again) == hash(bench)


def test_save_and_load(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text("older")
    bench = Bench.from_json(document(toolchain="x"))
    bench.save(path)
    assert Bench.load(path) == bench
    assert [child.name for child in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "b.json: not valid JSON"),
        ('{"schema": ' + "1" * 5000 + "}", "b.json: not valid JSON"),
        ("[]", r"b.json: field 'the document' must be an object"),
        (document(schema=2), "b.json: field 'schema' is 2, this version of llmc reads 1; measure anew"),
        (document(device=None), "b.json: field 'device' is missing"),
        (document(device=1), "b.json: field 'device' must be a string, found 1"),
        (document(bundle=[]), "b.json: field 'bundle' must be a string"),
        (document(measurements={}), "b.json: field 'measurements' must be an array"),
        (document(measurements=[]), "b.json: field 'measurements': a bench of 0 measurements; 1 to 32768"),
        (document(measurements=[1]), r"b.json: field 'measurements\[0\]' must be an object, found 1"),
        (document(m_phase="prefill"), r"b.json: field 'measurements\[0\].phase' must be one of prompt, decode"),
        (document(m_phase="decode"), r"b.json: field 'measurements\[0\]': decode bucket: query 128 must be 1"),
        (document(m_batch=0), r"b.json: field 'measurements\[0\]': prompt bucket: batch 0 must be at least 1"),
        (document(m_batch=1.5), r"b.json: field 'measurements\[0\].batch' must be an integer, found 1.5"),
        (document(m_context=2**31), r"b.json: field 'measurements\[0\]': .* must be at most 2147483647"),
        (document(m_seconds=None), r"b.json: field 'measurements\[0\].seconds' is missing; expected a number"),
        (document(m_seconds="1"), r"b.json: field 'measurements\[0\].seconds' must be a finite number, found \"1\""),
        (document(m_seconds=True), r"b.json: field 'measurements\[0\].seconds' must be a finite number, found true"),
        (document(m_seconds=math.nan), r"field 'measurements\[0\].seconds' must be a finite number, found NaN"),
        (document(m_seconds=math.inf), r"field 'measurements\[0\].seconds' must be a finite number, found Infinity"),
        (document(m_seconds=10**400), r"field 'measurements\[0\].seconds' must be a finite number, found 1000"),
        (document(m_seconds=0), r"field 'measurements\[0\]': prompt\[1x128\+0\]: seconds 0.0 must be 1e-09 to 1e\+06"),
        (document(m_seconds=-1.0), "seconds -1.0 must be"),
        (document(m_compile_seconds=-1), "compile_seconds -1.0 must be a number of at least 0"),
        (document(m_memory_bytes=-1), "memory_bytes -1 must be at least 0"),
        (document(m_memory_bytes=0.5), r"field 'measurements\[0\].memory_bytes' must be an integer"),
        (document(m_samples=0), "samples 0 must be at least 1"),
        (document(m_second=1), r"b.json: field 'measurements\[0\].second' is unknown; remove it"),
        (
            document(measurements=json.loads(document())["measurements"] * 2),
            r"b.json: field 'measurements': the bench has decode\[4x1\+512\] twice; keep one",
        ),
    ],
)
def test_reading_names_the_file_and_the_field(text, message):
    with pytest.raises(InputError, match=message):
        Bench.from_json(text, "b.json")


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read the bench .*absent\.json"):
        Bench.load(tmp_path / "absent.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"cannot read the bench .*binary"):
        Bench.load(tmp_path / "binary")
    with pytest.raises(InputError, match=r"cannot write the bench to .*No such file"):
        Bench.from_json(document()).save(tmp_path / "absent" / "bench.json")


def test_a_further_field_cannot_have_the_name_of_a_field():
    with pytest.raises(InputError, match="extra field 'device'"):
        Bench("x", Bench.from_json(document()).measurements, None, {"device": "y"})


# seconds


def test_seconds_of_what_was_not_measured_at_all_are_refused():
    bench = bench_of({(1, 128, 0): 0.1})
    with pytest.raises(InputError, match="the bench of test device has no decode measurement; measure at least one"):
        bench.seconds("decode", 1, 1, 0)
    for shape in ((0, 1, 0), (1, 0, 0), (1, 1, -1)):
        with pytest.raises(InputError, match="batch and query must be at least 1, context at least 0"):
            bench.seconds("prompt", *shape)


def test_arguments_are_broadcast():
    bench = bench_of({(1, 128, 0): 0.1, (2, 128, 0): 0.2})
    assert bench.seconds("prompt", [[1], [2]], [128, 128, 128], 0).tolist() == [[0.1] * 3, [0.2] * 3]
    assert bench.seconds("prompt", [], [], []).shape == (0,)
    assert bench.seconds("prompt", 2, 128, 0).shape == ()
    assert bench.seconds("prompt", 2, 128, 0) == 0.2


@pytest.mark.usefixtures("either_rule")
def test_measured_shapes_have_their_seconds_exactly_and_all_shapes_positive_ones(shapes):
    @PROPERTY
    @given(benches())
    def check(bench):
        for one in bench.measurements:
            shape = (one.bucket.batch, one.bucket.query, one.bucket.context)
            assert bench.seconds(one.bucket.phase, *shape) == one.seconds
        seconds = bench.seconds(bench.measurements[0].bucket.phase, *shapes.T)
        assert np.all(seconds > 0)
        assert np.all(np.isfinite(seconds))

    check()


@pytest.mark.usefixtures("either_rule")
def test_seconds_never_fall_as_a_shape_grows_where_the_measured_ones_never_do(shapes):
    @PROPERTY
    @given(benches())
    def check(bench):
        rising = bench.rising()
        seconds = rising.seconds(rising.measurements[0].bucket.phase, *shapes.T).reshape(5, 7, 7)
        for axis in range(3):
            assert np.all(np.diff(seconds, axis=axis) >= -1e-9 * seconds.max())

    check()


@PROPERTY
@given(benches())
def test_a_rising_bench_has_the_most_that_a_smaller_bucket_took(bench):
    rising = bench.rising()
    assert [one.bucket for one in rising.measurements] == [one.bucket for one in bench.measurements]
    for one in rising.measurements:
        b = one.bucket
        smaller = [m.seconds for m in bench.measurements if b.covers(m.bucket.batch, m.bucket.query, m.bucket.context)]
        assert one.seconds == max(smaller)
    assert rising.rising() is rising


@PROPERTY
@given(
    st.lists(st.floats(1e-3, 1), min_size=27, max_size=27),
    st.tuples(st.floats(1, 8), st.floats(10, 300), st.floats(0, 100)),
)
def test_between_measured_neighbours_seconds_are_between_theirs(measured, shape):
    axes = ((1, 2, 8), (10, 100, 300), (0, 7, 100))
    bench = bench_of(dict(zip(product(*axes), measured, strict=True)))
    corners = product(
        *(
            (max(value for value in axis if value <= x), min(value for value in axis if value >= x))
            for axis, x in zip(axes, shape, strict=True)
        )
    )
    around = [float(bench.seconds("prompt", *corner)) for corner in corners]
    assert min(around) * (1 - 1e-9) <= bench.seconds("prompt", *shape) <= max(around) * (1 + 1e-9)


@PROPERTY
@given(benches(), st.randoms(use_true_random=False))
def test_the_order_of_measurements_changes_nothing(bench, random):
    shuffled = list(bench.measurements)
    random.shuffle(shuffled)
    again = Bench(bench.device, tuple(shuffled))
    phase = shuffled[0].bucket.phase
    assert again == bench
    assert again.seconds(phase, 3, [1, 5, 50], 7).tolist() == bench.seconds(phase, 3, [1, 5, 50], 7).tolist()


@pytest.mark.usefixtures("either_rule")
def test_a_cost_that_is_affine_is_known_everywhere_from_a_few_points():
    bench = bench_of({(b, 1, c): decode_truth(b, c) for b in (1, 8, 32) for c in (128, 4096)}, "decode")
    batch, context = np.meshgrid([1, 3, 32, 64], [1, 128, 1000, 4096, 16384])
    expected = decode_truth(batch, context)
    assert np.allclose(bench.seconds("decode", batch, 1, context), expected, rtol=1e-9)
    assert bench.model_error("decode") < 1e-9


def test_prompts_between_doubling_queries_are_within_three_percent_and_beyond_them_exact():
    rows = product((1, 4), (128, 256, 512, 1024, 2048), (0, 2048))
    bench = bench_of({row: prompt_truth(*row) for row in rows})
    batch, query, context = (axis.ravel() for axis in np.meshgrid([1, 2, 4], range(128, 2049, 64), [0, 500, 2048]))
    error = bench.seconds("prompt", batch, query, context) / prompt_truth(batch, query, context) - 1
    assert error.min() > -1e-9
    assert error.max() < 0.03
    for shape in ((8, 4096, 4096), (1, 16, 0), (4, 8192, 0)):
        assert math.isclose(bench.seconds("prompt", *shape), prompt_truth(*shape), rel_tol=1e-9)


def test_corners_that_limits_forbid_to_measure_do_not_disturb_their_neighbours():
    rows = [row for row in product((1, 2, 4, 8), (256, 512, 1024, 2048), (0,)) if row[0] * row[1] <= 4096]
    bench = bench_of({row: prompt_truth(*row) * 1.3 for row in rows})
    assert math.isclose(bench.seconds("prompt", 3, 1300, 0), prompt_truth(3, 1300, 0) * 1.3, rel_tol=0.03)


def test_an_unmeasured_corner_follows_its_neighbours_not_the_model_alone():
    """Small batches are twice as slow as any affine model has it: so is the unmeasured corner beside them."""
    slow = {(b, q, 0): prompt_truth(b, q, 0) * (2 if b == 1 else 1) for b in (1, 8) for q in (128, 256, 512, 1024)}
    del slow[1, 256, 0]
    ratio = bench_of(slow).seconds("prompt", 1, 256, 0) / prompt_truth(1, 256, 0)
    assert 1.5 < ratio < 2.1


def test_one_measurement_scales_with_tokens_for_prompts_and_is_constant_for_decode():
    prompt = bench_of({(2, 128, 0): 0.5})
    assert prompt.seconds("prompt", [1, 2, 4], 128, 64).tolist() == [0.25, 0.5, 1.0]
    decode = bench_of({(2, 1, 128): 0.5}, "decode")
    assert decode.seconds("decode", [1, 2, 4], 1, [1, 128, 4096]).tolist() == [0.5] * 3
    assert prompt.model_error("prompt") is None
    assert prompt.model_error("decode") is None


def test_seconds_in_proportion_to_a_term_that_can_be_zero_stay_positive():
    bench = bench_of({(1, 1, 128): 0.1, (1, 1, 256): 0.2, (4, 1, 256): 0.8}, "decode")
    assert bench.seconds("decode", 1, 1, 0) > 0


@PROPERTY
@given(benches())
def test_the_fit_is_the_least_squares_one_among_those_without_negative_coefficients(bench):
    """Its gradient is 0 along every term in use, and no other term would lower the error (Karush–Kuhn–Tucker)."""
    phase = bench.measurements[0].bucket.phase
    shapes = np.array([[m.bucket.batch, m.bucket.query, m.bucket.context] for m in bench.measurements], np.float64)
    relative = _terms(phase, shapes) / np.array([[m.seconds] for m in bench.measurements])
    coefficients = _non_negative_least_squares(relative)
    assert np.all(coefficients >= 0)
    scale = np.maximum(np.linalg.norm(relative, axis=0), 1e-300)
    gradient = relative.T @ (relative @ coefficients - 1) / scale
    assert np.all(gradient >= -1e-4)
    assert np.all(np.abs(gradient[coefficients > 0]) < 1e-4)


def test_the_description_names_points_and_the_error_of_the_model():
    rows = {(b, 1, c): decode_truth(b, c) for b in (1, 8, 32) for c in (128, 4096)}
    rows[8, 1, 4096] *= 1.2
    bench = bench_of(rows, "decode")
    text = bench.describe()
    assert text.startswith("bench of test device: 0 prompt points, 6 decode points (affine model off by ")
    assert 0.001 < bench.model_error("decode") < 0.2
    assert bench_of({(1, 1, 0): 1.0}).describe() == "bench of test device: 1 prompt point, 0 decode points"


def test_thousands_of_measurements_can_be_used():
    rows = list(product(range(1, 17), range(64, 4097, 64), (0, 512)))
    bench = bench_of({row: prompt_truth(*row) for row in rows})
    assert bench.seconds("prompt", *np.array(rows).T).tolist() == [prompt_truth(*row) for row in rows]
    assert bench.model_error("prompt") < 1e-6
    assert bench.rising() is bench
