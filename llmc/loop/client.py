"""The server that a loop re-plans for: its /metrics, and its bundle (server/routes/admin.py)."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmc.buckets.traffic.formats.prometheus.live import fetch
from llmc.errors import ArtifactError, InputError

ANSWER_S = 30.0
SWAP_S = 1800.0
"""Seconds that a server may take to open and warm up a bundle."""
_PATH = "/admin/bundle"


@dataclass(frozen=True)
class Client:
    """Of the server at `url`, with its admin token. All raise InputError for one that does not answer as it should."""

    url: str
    token: str

    def metrics(self) -> str:
        """Its /metrics now."""
        return fetch(self.url.rstrip("/") + "/metrics")

    def bundle(self) -> Path:
        """The folder of the bundle that it serves. Raises InputError where this host has no such folder."""
        folder = Path(str(self._ask("GET", None, ANSWER_S)["bundle"]))
        if not folder.is_dir():
            raise InputError(f"{self.url} serves {folder}, which is not here; run llmc loop on the server's own host")
        return folder

    def swap(self, bundle: Path) -> dict[str, Any]:
        """Have it serve another bundle. Raises ArtifactError, in the server's words, where it refuses."""
        return self._ask("POST", {"bundle": str(bundle)}, SWAP_S)

    def _ask(self, method: str, body: Mapping[str, str] | None, seconds: float) -> dict[str, Any]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            connection = kind(parts.hostname or "", parts.port, timeout=seconds)
            try:
                connection.request(method, _PATH, None if body is None else json.dumps(body), headers)
                answer = connection.getresponse()
                found: Any = json.loads(answer.read())
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise InputError(f"{self.url}{_PATH} does not answer: {error or type(error).__name__}") from error
        if answer.status == 200:
            return dict(found)
        said = found.get("error", {}).get("message", answer.reason) if isinstance(found, dict) else answer.reason
        if answer.status in (401, 404):
            raise InputError(f"{self.url}: {said}; start llmc serve and llmc loop with the same LLMC_ADMIN_TOKEN")
        raise ArtifactError(f"{self.url} refused the bundle: {said}")
