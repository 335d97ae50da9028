#!/usr/bin/env bash
# Build wheel and source distribution in dist/ and check them. With --install, also install the wheel into a fresh
# environment and run `embodyrl train` and `embodyrl eval` in an empty folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
rm -rf dist
"$python" -m build --no-isolation --outdir dist . >/dev/null
"$python" -m twine check --strict dist/*
for wheel in dist/*.whl; do
    size=$(stat -c %s "$wheel")
    echo "$wheel: $((size / 1000000)) MB"
    [ "$size" -le 20000000 ] || { echo "the wheel must have at most 20 MB" >&2; exit 1; }
done
[ "${1:-}" = --install ] || exit 0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet dist/*.whl
cd "$folder"
venv/bin/embodyrl train runner.max_steps=5
venv/bin/embodyrl eval eval.episodes=10
