#!/bin/sh
# Compiles this bundle's recipes on a Gaudi host, adds them to the bundle, and runs every bucket twice. After an interrupt,
# run the script again to continue. The script passes its arguments to `llmc warmup`.
#
# Install Intel's Gaudi software (habana_frameworks.torch) and llmc in one Python environment.
set -eu
bundle=${BUNDLE:-{{ bundle }}}
export PT_HPU_LAZY_MODE="${PT_HPU_LAZY_MODE:-0}"
exec llmc warmup "$bundle" "$@"
