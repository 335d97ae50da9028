#!/usr/bin/env bash
# Build wheel and source distribution in dist/ and check them. With --install, also install the wheel into a fresh
# environment, run `embodyrl train` and `embodyrl eval` in an empty folder, and request the page of `embodyrl play`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
rm -rf dist
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m build --no-isolation --outdir dist . >/dev/null
for plugin in integrations/*/; do
    "$python" -m build --no-isolation --skip-dependency-check --outdir "$folder/plugins" "$plugin" >/dev/null
done
"$python" -m twine check --strict dist/* "$folder"/plugins/*
for wheel in dist/*.whl; do
    size=$(stat -c %s "$wheel")
    echo "$wheel: $((size / 1000000)) MB"
    [ "$size" -le 20000000 ] || { echo "the wheel must have at most 20 MB" >&2; exit 1; }
done
[ "${1:-}" = --install ] || exit 0
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet dist/*.whl
cd "$folder"
venv/bin/embodyrl train runner.max_steps=5
venv/bin/embodyrl eval eval.episodes=10
venv/bin/embodyrl play >play.log &
play=$!
trap 'kill "$play" 2>/dev/null || true; wait "$play" 2>/dev/null || true; rm -rf "$folder"' EXIT
for _ in {1..60}; do
    page=$(grep -om1 'http://[^ ]*' play.log || true)
    [ -z "$page" ] || { curl -fsS -o /dev/null "$page" && echo "the page of embodyrl play answers" && exit 0; }
    kill -0 "$play" 2>/dev/null || break
    sleep 1
done
cat play.log >&2
exit 1
