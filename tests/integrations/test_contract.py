"""What holds for every server whose bucket rules llmc has, whatever they are."""

from __future__ import annotations

import pytest

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import AssumedStepTime
from llmc.errors import InputError, UnknownNameError
from llmc.integrations import BUCKETS, bucket_rules, integrations
from llmc.integrations.base import BucketRules, Export, Setup, collect
from llmc.integrations.settings import complete
from llmc.registry import Registry

REQUESTS = [TrafficRequest(index / 8, 1 + 37 * index % 900, 1 + 11 * index % 60) for index in range(40)]


@pytest.fixture(params=sorted(BUCKETS.names()))
def server(request: pytest.FixtureRequest) -> BucketRules:
    return bucket_rules(request.param)


@pytest.fixture
def built(server: BucketRules) -> Setup:
    return Setup(server.limits({"max_model_len": 2048}), complete(server.settings, {}))


def test_an_unknown_server_names_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown server 'vlm'; known: .*vllm"):
        bucket_rules("vlm")


def test_it_says_what_it_is_and_where_its_rules_are_from(server: BucketRules) -> None:
    assert BUCKETS.names() and bucket_rules(server.name).title == server.title
    assert any(digit.isdigit() for digit in server.source) and server.cost.source
    assert len({setting.name for setting in server.settings}) == len(server.settings)
    assert all(setting.help.endswith(".") for setting in server.settings)


def test_its_own_lists_are_in_order_and_are_what_it_accepts(server: BucketRules, built: Setup) -> None:
    own = server.default(built)
    assert set(own) == {family.name for family in server.families}
    for family in server.families:
        assert list(own[family.name]) == sorted(set(own[family.name]))
        assert all(len(shape) == len(family.axes) for shape in own[family.name])
    assert server.accept(built, own).lists == own
    assert server.graphs(built, own) >= 1


def test_its_own_lists_are_written_and_read(server: BucketRules, built: Setup) -> None:
    own = server.default(built)
    assert server.read(server.export(built, own), built) == own
    assert server.read(Export(), built) == own


def test_a_graph_of_the_list_serves_the_step_of_its_shape(server: BucketRules, built: Setup) -> None:
    own = server.default(built)
    for family in server.families:
        finder = server.finder(built, family.name, own[family.name])
        for shape in own[family.name]:
            found = finder.find(shape)
            assert found.miss is None and found.shape in own[family.name]
            assert server.work(built, family.name, found.shape) <= server.work(built, family.name, shape)


def test_what_it_proposes_is_accepted_and_no_longer_than_requested(server: BucketRules, built: Setup) -> None:
    demands = collect(server.demands(built, REQUESTS, AssumedStepTime()))
    assert demands and set(demands) <= {family.name for family in server.families}
    own = server.default(built)
    most = {name: max(3, len(shapes)) for name, shapes in own.items()}
    proposed = server.propose(built, demands, most)
    assert all(len(proposed[name]) <= most[name] for name in proposed)
    assert server.accept(built, proposed).lists == proposed
    for name, shapes in demands.items():
        finder = server.finder(built, name, proposed[name])
        own_finder = server.finder(built, name, own[name])
        for shape in shapes:
            if own_finder.find(shape).miss is None:
                assert finder.find(shape).miss is None, (name, shape)


def test_steps_have_work_and_no_more_real_work_than_their_graphs(server: BucketRules, built: Setup) -> None:
    for family, shape, steps, real in server.demands(built, REQUESTS, AssumedStepTime()):
        finder = server.finder(built, family, server.default(built)[family])
        found = finder.find(shape)
        assert steps > 0 and real > 0
        assert found.miss or real <= steps * server.work(built, family, found.shape)


def test_a_log_without_a_list_is_none(server: BucketRules) -> None:
    assert server.read_log(["INFO started", "", "{'a': [1, 2]}"]) is None


def test_text_that_is_no_configuration_is_an_error_or_its_own_list(server: BucketRules, built: Setup) -> None:
    for given in (Export(arguments=("", "--", "-", "model")), Export(environment={"A": "B"})):
        assert server.read(given, built) == server.default(built)
    for text in ("[", "\0", "\ufeff{}"):
        try:
            server.read(Export(files={"config.json": text}), built)
        except InputError as error:
            assert "\n" not in str(error)


def test_an_integration_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Registry("integration", own={"mine": "llmc_no_such_package:INTEGRATION"})
    monkeypatch.setattr("llmc.integrations.INTEGRATIONS", broken)
    with pytest.raises(InputError, match=r"the integration 'mine' .* cannot be imported \(No module named 'llmc_no"):
        integrations.__wrapped__()


def test_its_own_lists_serve_uniform_steps(server: BucketRules, built: Setup) -> None:
    own = server.default(built)
    found = collect(server.uniform(built, own))
    assert any(found.values())
    for name, shapes in found.items():
        finder = server.finder(built, name, own[name])
        assert all(demand.real == demand.steps * server.work(built, name, shape) for shape, demand in shapes.items())
        assert not any(finder.find(shape).miss == "error" for shape in shapes)
