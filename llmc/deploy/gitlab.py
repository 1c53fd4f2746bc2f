"""`llmc deploy gitlab`: the same pipeline for GitLab CI, as a file to include."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from llmc.deploy.pipeline import Pipeline


class Gitlab(Pipeline):
    """See the module's docstring."""

    name: ClassVar[str] = "gitlab"
    default_runner: ClassVar[str] = ""
    constraints: ClassVar[str] = "llmc-{name}-constraints.txt"
    templates: ClassVar[Mapping[str, str]] = {".gitlab-ci-llmc-{name}.yml": "gitlab/pipeline"}
