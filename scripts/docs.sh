#!/usr/bin/env bash
# Build the site in site/, or in the folder of the first argument. Warnings are errors.
set -euo pipefail
case "${1:-}" in -*) echo "usage: bash scripts/docs.sh [FOLDER]" >&2; exit 2 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict --site-dir "${1:-site}"
