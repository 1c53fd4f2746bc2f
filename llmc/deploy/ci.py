"""`llmc deploy github-actions` and `gitlab`: a pipeline that plans, compiles, verifies, certifies and pushes a bundle.

A job fails with llmc's exit code: 2 if a plan leaves a request uncovered or pads too much, 3 without the device, 4 if
outputs differ, 5 without a signature, 1 if something was compiled while serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

from llmc.deploy.base import DeploymentKind, Options
from llmc.errors import InputError


class Pipeline(DeploymentKind):
    """Base class of the CI kinds."""

    takes = ("bundle", "model", "bundle_image", "traffic", "max_padding", "runner")
    needs = ("bundle", "model", "bundle_image")
    default_runner: ClassVar[str]
    constraints: ClassVar[str]
    """Path of the constraints file with the package versions that compiled the bundle; `{name}` as in `templates`."""

    def files(self, options: Options) -> Mapping[str, str]:
        """Render the templates, and add the constraints file."""
        return {**super().files(options), self.constraints.format(name=options.label): options.facts.constraints}

    def values(self, options: Options) -> dict[str, Any]:
        """Raises InputError for --max-padding without traffic, and without a runner that has the device."""
        found, facts = super().values(options), options.facts
        if options.max_padding and not options.traffic:
            raise InputError("--max-padding needs recorded requests: name them with --traffic FILE")
        if found["hosting"].resources and not options.runner:
            raise InputError(
                f"a certificate for {facts.manifest.device} must be created on that device: name a runner that has it "
                "with --runner"
            )
        limits = facts.plan.limits
        plan = [
            word
            for field in fields(limits)
            if type(value := getattr(limits, field.name)) is int
            for word in (f"--{field.name.replace('_', '-')}", str(value))
        ]
        reference = options.bundle_image
        assert reference is not None
        return {
            **found, "plan_flags": plan, "registry": str(reference.host), "oci": str(reference),
            "extras": f"{options.compile_extras},{options.extras},remote",
            "runner": options.runner or self.default_runner,
            "constraints": self.constraints.format(name=options.label),
        }  # fmt: skip


class Gitlab(Pipeline):
    """A pipeline for GitLab CI, as a file to include."""

    name = "gitlab"
    default_runner = ""
    constraints = "llmc-{name}-constraints.txt"
    templates: ClassVar[Mapping[str, str]] = {".gitlab-ci-llmc-{name}.yml": "gitlab/pipeline"}


class GithubActions(Pipeline):
    """A GitHub workflow, and the action that it and other workflows use."""

    name = "github-actions"
    default_runner = "ubuntu-latest"
    constraints = ".github/llmc-{name}-constraints.txt"
    templates: ClassVar[Mapping[str, str]] = {
        ".github/workflows/llmc-{name}.yml": "github-actions/workflow",
        ".github/actions/llmc-bundle/action.yml": "github-actions/action",
    }
