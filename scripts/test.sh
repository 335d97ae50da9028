#!/usr/bin/env bash
# Set up embodyrl in .venv, check style, types and import directions, and run the tests.
# `bash scripts/test.sh fast` leaves out simulators, further processes and slow tests.
# Other arguments go to pytest; `bash scripts/test.sh -m slow` runs the slow tests, for hours.
EXTRAS=libero,maniskill,dev
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
say "style, types, import directions"
ruff check .
ruff format --check .
pyright --warnings  # embodyrl and tools, see pyproject.toml
lint-imports
[ "${1:-}" != fast ] || { shift; set -- -m "not sim and not integration and not slow and not realmodel" "$@"; }
say "tests"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Two processes, each with a file at a time; a later -n in the arguments counts, and -n 0 is plain pytest.
exec python -m pytest -n 2 --dist loadfile "$@"
