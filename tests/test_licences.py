"""LICENCES.md says of each locked distribution what its metadata says, and every licence is an allowed one."""

from __future__ import annotations

import pytest

from scripts import licences

PAGE = licences.recorded(licences.PAGE.read_text())


def test_the_page_is_what_the_script_writes() -> None:
    assert licences.written(licences.PAGE.read_text()) == licences.PAGE.read_text(), "python -m scripts.licences"
    assert sorted(PAGE) == sorted(licences.locked())


def test_every_licence_is_allowed() -> None:
    assert not {name: licence for name, licence in PAGE.items() if not licences.is_allowed(name, licence)}
    installed = [name for name in PAGE if licences.licence_of(name)]
    assert len(installed) > 100 and not [name for name in installed if PAGE[name] == licences.NOT_READ]


def test_an_exception_is_locked_and_needed() -> None:
    names = licences.locked()
    assert all(
        name in names and not set(licence.split()) & licences.ALLOWED for name, licence in licences.EXCEPTIONS.items()
    )


@pytest.mark.parametrize("licence", ["GPL-3.0", "MIT AND GPL-2.0", "unknown", "", "LicenseRef-NVIDIA", "Proprietary"])
def test_another_licence_is_refused(licence: str) -> None:
    assert not licences.is_allowed("somebodys", licence)


@pytest.mark.parametrize("licence", ["MIT", "GPL-3.0 OR MIT", "(Apache-2.0 AND MIT) OR GPL-2.0", "MPL-2.0 AND MIT"])
def test_a_choice_of_which_one_is_allowed_is_allowed(licence: str) -> None:
    assert licences.is_allowed("somebodys", licence)
