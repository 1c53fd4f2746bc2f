"""Files that a compile leaves beside its bundle for another host: a plan as a server reads it, and jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

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
    """The plan in the form of the server `name`, within its own `limits` if they are not the plan's.

    None, and a warning, where its rules leave nothing of it.
    """
    server = bucket_rules(name)
    setup = Setup(limits or plan.limits, complete(server.settings, {}))
    try:
        return server.export(setup, server.accept(setup, server.from_plan(setup, plan)).lists)
    except InputError as error:
        logger().warning("no bucket file for %s: %s", name, error)
        return None


def server_files(name: str, folder: Path, found: Export | None) -> Mapping[str, str]:
    """Texts of an export by file name, for files in `folder`; none of none."""
    return {} if found is None else texts_for(folder, found, name)


def rendered(package: str, names: Sequence[str], values: Mapping[str, str]) -> dict[str, str]:
    """The templates of these names in the folder `templates` of a package, with `values`."""
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)  # noqa: S701
    templates = files(package) / "templates"
    return {name: environment.from_string((templates / name).read_text()).render(values) for name in names}
