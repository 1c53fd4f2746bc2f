"""TPU slices by name, and what libtpu says of each without a TPU."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.targets.xla import tpu
from llmc.compiler.targets.xla.tpu import CHIPS, device_bytes, known, parse_topology
from llmc.errors import DeviceError, InputError
from llmc.platforms import install_line
from llmc.runtime.executors.xla.client import LIBTPU_ENVIRONMENT
from tests.compiler.targets.xla.refusals import out_of_memory
from tests.tiers import default_cases, full

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
ROOT = Path(__file__).parents[4]
PADDED = [(30, 10, 3, 2048, 64), (30, 10, 3, 2050, 64), (30, 10, 1, 130, 64), (64, 5, 9), (576,), (30, 576), (7, 1)]
SLICES = ("v4-2x2x1", "v5e-1x1", "v5p-2x2x2", "v6e-2x4", "tpu7x-2x2x1")

PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from llmc.compiler.targets.xla.tpu import parse_topology

jax.config.update("jax_traceback_in_locations_limit", 0)

def compiled(name, function, *shapes, dtype=jnp.bfloat16):
    where = SingleDeviceSharding(parse_topology(name).describe()[0])
    shaped = [jax.ShapeDtypeStruct(s, dtype, sharding=where) for s in shapes]
    return jax.jit(function).trace(*shaped).lower(lowering_platforms=("tpu",)).compile()
"""


def ran(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    """What a program prints that is in a file at `path`, in a process that may use libtpu as a compiler only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PROGRAM + textwrap.dedent(program))
    hidden = ("TPU_", "JAX_", "XLA_", "LIBTPU_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    environment = {**kept, **LIBTPU_ENVIRONMENT, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What libtpu says: devices of every slice, bytes of padded arrays, and its words for too much."""
    program = f"""
    import json
    from llmc.compiler.targets.xla.tpu import known

    def refusal(name, gib):
        try:
            compiled(name, lambda x: x[0, 0], (int(gib * 2**30 / 4 / 8192) * 8, 1024), dtype=jnp.float32)
        except jax.errors.JaxRuntimeError as e:
            return str(e)
        return ""

    def arguments(shape):
        made = compiled("v5e-1x1", lambda x: x[(slice(0, 1),) * len(shape)], shape)
        return made.memory_analysis().argument_size_in_bytes

    devices = {{}}
    for t in known():
        found = t.describe()
        devices[t.name] = [len(found), found[0].device_kind, len({{d.process_index for d in found}})]
    edges = {{}}
    for name in {SLICES}:
        usable = parse_topology(name).usable_bytes / 2**30
        edges[name] = [refusal(name, usable - 0.001), refusal(name, usable + 0.002), refusal(name, 3 * usable)]
    sizes = [arguments(tuple(shape)) for shape in {PADDED}]
    print(json.dumps({{"devices": devices, "edges": edges, "sizes": sizes}}))
    """
    done = ran(program, tmp_path_factory.mktemp("libtpu") / "ask.py")
    return {**json.loads(done.stdout), "stderr": done.stderr}


def test_a_slice_has_a_name_that_users_type_and_one_that_libtpu_knows() -> None:
    found = parse_topology("v5e-2x4")
    assert (found.name, found.libtpu_name, found.generation, found.shape) == ("v5e-2x4", "v5e:2x4", "v5e", (2, 4))
    assert (found.chips, found.devices, found.hosts, found.unit) == (8, 8, 1, "chip")


@pytest.mark.parametrize("name", [t.name for t in known()])
def test_every_known_slice_is_read_back_by_its_name(name: str) -> None:
    assert parse_topology(name).name == name


def test_one_device_is_one_chip_except_where_the_two_cores_of_a_chip_are_two_devices() -> None:
    slices = {t.generation: t for t in known() if t.chips == 4}
    assert {name: t.devices for name, t in slices.items()} == {"v4": 4, "v5e": 4, "v5p": 4, "v6e": 4, "tpu7x": 8}
    assert parse_topology("tpu7x-2x2x1").unit == "device"


def test_both_cores_of_a_v4_chip_are_requested_as_one_device() -> None:
    assert parse_topology("v4-2x2x1").arguments()["chip_config_name"] == "megacore"
    assert "chip_config_name" not in parse_topology("v5p-2x2x1").arguments()


def test_a_slice_that_has_a_machine_of_its_own_is_one_host_and_a_larger_one_hosts_of_four_chips() -> None:
    names = ("v5e-1x1", "v6e-2x4", "v5p-2x2x1", "v6e-4x4", "v5p-2x2x2", "v4-1x1x1")
    bounds = [parse_topology(name).arguments()["chips_per_host_bounds"] for name in names]
    assert bounds == [[1, 1, 1], [2, 4, 1], [2, 2, 1], [2, 2, 1], [2, 2, 1], [1, 1, 1]]
    assert [parse_topology(name).hosts for name in names] == [1, 1, 1, 4, 2, 1]


@pytest.mark.parametrize(
    ("accelerator_type", "name"),
    [
        ("v5litepod-1", "v5e-1x1"), ("v5litepod-4", "v5e-2x2"), ("v5litepod-256", "v5e-16x16"), ("v6e-8", "v6e-2x4"),
        ("v4-8", "v4-2x2x1"), ("v5p-8", "v5p-2x2x1"), ("v5p-16", "v5p-2x2x2"),
    ],
)  # fmt: skip
def test_an_accelerator_type_of_google_cloud_names_a_slice_too(accelerator_type: str, name: str) -> None:
    assert parse_topology(accelerator_type).name == name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "",
            "--device tpu: name the slice, as tpu:GENERATION-SHAPE, for example tpu:v5e-2x2; known generations: v4",
        ),
        ("v9-2x2", "unknown TPU generation 'v9' in topology 'v9-2x2'; known generations: v4, v5e, v5p, v6e, tpu7x"),
        ("v9-8", "unknown TPU generation 'v9' in topology 'v9-8'; known generations: v4, v5e, v5p, v6e, tpu7x"),
        ("v5e-3x3", "v5e has no slice of shape 3x3; known for v5e: v5e-1x1, v5e-2x2, v5e-2x4"),
        ("v5e-2x2x1", "v5e has no slice of shape 2x2x1; known for v5e: v5e-1x1"),
        ("v5e-4", "topology v5e-4 has no shape; known for v5e: v5e-1x1"),
        ("v5litepod-3", "accelerator type v5litepod-3 is no slice with a known shape; known for v5e: v5e-1x1"),
        ("v5p-2", "accelerator type v5p-2 is no slice with a known shape; known for v5p"),
        ("-4", "'-4' is not of the form GENERATION-SHAPE, for example tpu:v5e-2x2"),
        ("v5e:2x2", "'v5e:2x2' is not of the form GENERATION-SHAPE, for example tpu:v5e-2x2"),
        ("V5E-2x2\n", "is not of the form"),
        ("v5e-" + "9" * 5000 + "x1", "is not of the form"),
    ],
)
def test_what_is_no_slice_is_refused_with_those_that_are(text: str, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)) as refused:
        parse_topology(text)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(("missing", "named"), [(("libtpu",), "libtpu"), (("jax", "libtpu"), "jax and libtpu")])
def test_without_libtpu_the_line_that_installs_it_is_reported(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], named: str
) -> None:
    monkeypatch.setattr(tpu, "find_spec", lambda name: None if name in missing else find_spec(name))
    says = f"compiling for a TPU needs {named}; install it with: {install_line('tpu')}"
    with pytest.raises(DeviceError, match=re.escape(says)):
        parse_topology("v5e-1x1").describe()


def test_figures_of_a_chip_agree_with_each_other() -> None:
    for chip in CHIPS.values():
        assert 0.95 < chip.usable_bytes * chip.devices_per_chip / chip.hbm_bytes < 1.01, chip.name
        assert all(len(shape) == chip.axes for shape in chip.shapes)
        chips = [math.prod(shape) for shape in chip.shapes]
        assert chips == sorted(set(chips))


@full
@needs_libtpu
def test_libtpu_describes_every_known_slice_as_it_is_described_here(reported: dict[str, Any]) -> None:
    assert reported["devices"] == {t.name: [t.devices, t.chip.device_kind, t.hosts] for t in known()}


@full
@needs_libtpu
def test_libtpu_prints_nothing_in_its_environment(reported: dict[str, Any]) -> None:
    assert reported["stderr"] == ""


@default_cases(1)
@needs_libtpu
@pytest.mark.parametrize("name", SLICES)
def test_programs_may_take_what_the_compiler_lets_them_take(reported: dict[str, Any], name: str) -> None:
    within, beyond, far_beyond = reported["edges"][name]
    assert within == ""
    for refusal in (beyond, far_beyond):
        found = out_of_memory(refusal)
        assert found is not None, refusal
        used, available = found
        assert used > available == pytest.approx(parse_topology(name).usable_bytes, abs=8 << 20)


@needs_libtpu
def test_padding_of_arrays_is_known_before_anything_is_compiled(reported: dict[str, Any]) -> None:
    assert reported["sizes"] == [device_bytes(shape, 2) for shape in PADDED]


@full
@needs_libtpu
def test_executables_are_the_same_bytes_in_every_process_and_wherever_the_source_lies(tmp_path: Path) -> None:
    program = """
    import hashlib
    step = lambda x, w: jax.nn.softmax(x @ w)
    made = compiled("v5e-1x1", step, (64, 512), (512, 1024)).runtime_executable().serialize()
    print(hashlib.sha256(made).hexdigest(), b"step.py" in made)
    """
    one = ran(program, tmp_path / "step.py").stdout
    other = ran("\n\n# further down\n" + textwrap.dedent(program), tmp_path / "elsewhere" / "step.py").stdout
    assert one == other
    assert one.endswith(" False\n")
