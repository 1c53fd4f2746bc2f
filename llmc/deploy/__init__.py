"""Files that deploy a bundle: kinds of deployment, found by name, over templates beside them.

Other packages bring theirs in the entry-point group "llmc.deployments" (registry.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.registry import Registry

if TYPE_CHECKING:
    from llmc.deploy.base import DeploymentKind

KINDS = Registry(
    "kind of deployment",
    "llmc.deployments",
    {
        "compose": "llmc.deploy.docker:Compose",
        "docker": "llmc.deploy.docker:Docker",
        "github-actions": "llmc.deploy.ci:GithubActions",
        "gitlab": "llmc.deploy.ci:Gitlab",
        "kserve": "llmc.deploy.kubernetes:Kserve",
        "kubernetes": "llmc.deploy.kubernetes:Kubernetes",
        "opea": "llmc.deploy.opea:Opea",
        "systemd": "llmc.deploy.systemd:Systemd",
        "vllm": "llmc.deploy.vllm:VllmDeployment",
    },
)
"""Classes that take no arguments."""


def create(name: str) -> DeploymentKind:
    """The kind of a name. Raises UnknownNameError, listing the known ones."""
    built: DeploymentKind = KINDS.get(name)()
    return built
