#!/bin/sh
# Finish this bundle on a Gaudi host, and run every bucket twice. The recipes that the host compiles become part of the
# bundle. If it is interrupted, run it again: it goes on where it was. Arguments go to `llmc warmup`.
#
# Needs Intel's Gaudi software (habana_frameworks.torch) and llmc in one Python environment.
set -eu
bundle=${BUNDLE:-{{ bundle }}}
export PT_HPU_LAZY_MODE="${PT_HPU_LAZY_MODE:-0}"
exec llmc warmup "$bundle" "$@"
