"""What a replica tells its supervisor arrives as it was told."""

from __future__ import annotations

from typing import get_args

import pytest

from llmc.errors import ArtifactError
from llmc.server.events import Event, Listening, Ready, ReplicaBack, ReplicaLost, SwapRefused
from llmc.server.replicas import ENDED, ReplicaFailure, failure_of, line_of, reported_by
from llmc.server.state import Progress


@pytest.mark.parametrize("reported", [
    Ready("toy", "fake", 0.5, 2, 0), SwapRefused("a line\nand another", "broken_bundle"),
    ReplicaFailure("it is empty", 5),
])  # fmt: skip
def test_there_and_back_in_a_line(reported: Event | ReplicaFailure) -> None:
    line = line_of(reported)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert reported_by(line[:-1]) == reported


def test_a_connection_that_ended() -> None:
    assert reported_by(ENDED[:-1]) is None


def test_each_event_of_a_server_is_reported_or_is_the_supervisors_own() -> None:
    own = {Progress, Listening, ReplicaLost, ReplicaBack}
    for kind in set(get_args(Event)) - own:
        nothing = kind(*[""] * (kind.__init__.__code__.co_argcount - 1))
        assert isinstance(reported_by(line_of(nothing)[:-1]), kind)
    assert line_of(Progress("compile")) == b""


def test_an_error_keeps_its_exit_code() -> None:
    error = failure_of(ArtifactError("the bundle is empty")).error
    assert (str(error), error.exit_code) == ("the bundle is empty", ArtifactError.exit_code)
    assert failure_of(KeyError("x")) == ReplicaFailure("unexpected KeyError: 'x'", 1)
