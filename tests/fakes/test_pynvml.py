"""The fake NVML is what nvidia-ml-py is, as far as it goes."""

from __future__ import annotations

import inspect

import pytest

from tests.fakes import pynvml as fake

real = pytest.importorskip("pynvml")
OWN = {"set_host", "open_count"}


def test_its_functions_take_what_the_real_ones_take() -> None:
    functions = [n for n, f in vars(fake).items() if inspect.isfunction(f) and not n.startswith("_") and n not in OWN]
    functions.remove("dataclass")
    assert len(functions) == 11
    for name in functions:
        real_function = inspect.unwrap(getattr(real, name))
        assert list(inspect.signature(getattr(fake, name)).parameters) == list(
            inspect.signature(real_function).parameters
        ), name


def test_its_errors_are_the_real_ones_by_number_class_and_word() -> None:
    for error in fake.NVMLError.__subclasses__():
        theirs = real.NVMLError(error.code)
        ours = fake.NVMLError(error.code)
        assert (type(ours).__name__, str(ours), ours.value) == (type(theirs).__name__, str(theirs), theirs.value)


def test_it_answers_nothing_before_it_is_initialised() -> None:
    fake.set_host(fake.Device())
    with pytest.raises(fake.NVMLError_Uninitialized):
        fake.nvmlDeviceGetCount()
