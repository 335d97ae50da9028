#!/usr/bin/env bash
# Set up embodyrl in .venv and run the default training on real LIBERO. No GPU, no download of weights.
# Further arguments go to the training: bash scripts/quickstart.sh seed=1
EXTRAS=libero,maniskill,dev
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
say "training on LIBERO: embodyrl train experiment=libero_laptop $*"
exec embodyrl train experiment=libero_laptop "$@"
