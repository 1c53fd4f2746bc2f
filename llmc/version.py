"""llmc's version, recorded in manifests, servers and metrics, and the Python version that it requires."""

import sys

__version__ = "0.1.0"
LEAST_PYTHON = (3, 11)

if sys.version_info[:2] < LEAST_PYTHON:
    raise ImportError(
        f"llmc needs Python {'.'.join(map(str, LEAST_PYTHON))} or newer, and this is {sys.version.split()[0]} "
        f"({sys.executable}): create an environment with a newer one"
    )
