"""What libtpu reads from the environment, for hosts without a TPU: there it is a compiler and nothing else.

Found by trying, with libtpu 0.0.42: without these it writes warnings to stderr and logs to /tmp/tpu_logs, looks for the
metadata server of a Google Cloud host, and refuses a second process. Executables are the same bytes with and without
them, and under any TPU_ACCELERATOR_TYPE, so they are in no key.

They must not be set where there is a TPU: they would describe another machine to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LIBTPU_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else one process a host, by a lock file
        "TPU_LOG_DIR": "disabled",  # a word that libtpu knows, not a folder
        "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is asked
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",  # any known type: silences "Failed to find host bounds"
        "TPU_WORKER_HOSTNAMES": "localhost",  # silences "unexpected worker hostname"
    }
)
"""Set before JAX first asks for a topology; what the user has set already stays."""
