"""`llmc deploy github-actions`: a workflow, and the action that it uses, which other workflows may use as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from llmc.deploy.pipeline import Pipeline


class GithubActions(Pipeline):
    """See the module's docstring."""

    name: ClassVar[str] = "github-actions"
    default_runner: ClassVar[str] = "ubuntu-latest"
    constraints: ClassVar[str] = ".github/llmc-{name}-constraints.txt"
    templates: ClassVar[Mapping[str, str]] = {
        ".github/workflows/llmc-{name}.yml": "github-actions/workflow",
        ".github/actions/llmc-bundle/action.yml": "github-actions/action",
    }
