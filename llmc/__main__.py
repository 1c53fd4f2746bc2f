"""Entry point of `python -m llmc`."""

from llmc.cli.main import run

run()
