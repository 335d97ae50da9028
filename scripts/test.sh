#!/usr/bin/env bash
# Set up embodyrl in .venv, check style, types and import directions, and run the tests.
# Arguments go to pytest: bash scripts/test.sh -m "not sim and not integration and not slow"
EXTRAS=libero,maniskill,dev
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
say "style, types, import directions"
ruff check .
ruff format --check .
pyright --warnings embodyrl
lint-imports
say "tests"
exec python -m pytest "$@"
