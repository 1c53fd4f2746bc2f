"""Files that a compile writes next to its bundle for another host: a plan in a server's format, and jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from llmc.artifacts.log import logger
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import Export, Setup
from llmc.integrations.configuration import texts_for
from llmc.integrations.settings import complete


def exported(name: str, plan: Plan, limits: Limits | None = None) -> Export | None:
    """Export the plan for the server `name`. None, with a warning, where the server's rules leave nothing of it."""
    server = bucket_rules(name)
    setup = Setup(limits or plan.limits, complete(server.settings, {}))
    try:
        return server.export(setup, server.accept(setup, server.from_plan(setup, plan)).lists)
    except InputError as error:
        logger().warning("no bucket file for %s: %s", name, error)
        return None


def server_files(name: str, found: Export | None) -> Mapping[str, str]:
    """Return the texts of an export by file name; {} without an export."""
    return {} if found is None else texts_for(found, name)


def rendered(package: str, names: Sequence[str], values: Mapping[str, str]) -> dict[str, str]:
    """Fill in templates of a package's folder `templates`."""
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)  # noqa: S701
    templates = files(package) / "templates"
    return {name: environment.from_string((templates / name).read_text()).render(values) for name in names}
