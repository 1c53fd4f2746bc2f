"""Files that deploy a bundle: kinds of deployment by name, rendered from templates.

Other packages register theirs in the entry-point group "llmc.deployments" (registry.py).
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
        "opea": "llmc.deploy.docker:Opea",
        "systemd": "llmc.deploy.docker:Systemd",
        "vllm": "llmc.deploy.vllm:VllmDeployment",
    },
)
"""Classes whose constructors take no arguments."""


def create(name: str) -> DeploymentKind:
    """Create the deployment kind of a name. Raises UnknownNameError listing the known ones."""
    built: DeploymentKind = KINDS.get(name)()
    return built
