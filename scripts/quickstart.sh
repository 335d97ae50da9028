#!/usr/bin/env bash
# Set up embodyrl in .venv, train on the built-in table, and meanwhile install LIBERO; then train on real LIBERO.
# --cuda or --cpu chooses the build of torch (default: CUDA where there is a GPU). Other arguments go to both trainings.
case "${1:-}" in --cuda | --cpu) export TORCH_BUILD="${1#--}" && shift ;; esac
EXTRAS=
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set -m # a group of its own, which Ctrl-C in the training ends as a whole
(EXTRAS=libero && system_libraries && python_packages) >.venv/libero.log 2>&1 </dev/null &
libero=$!
set +m
trap 'kill -- "-$libero" 2>/dev/null || true' EXIT
say "training on the table, a few minutes: embodyrl train $*"
embodyrl train "$@"
say "LIBERO is being installed (.venv/libero.log)"
wait "$libero" || { cat .venv/libero.log >&2 && exit 1; }
say "training on LIBERO, about ten minutes: embodyrl train experiment=libero_laptop $*"
exec embodyrl train experiment=libero_laptop "$@"
