# Shared by quickstart.sh and test.sh: makes .venv, installs embodyrl into it, and the system libraries that software
# rendering needs. Sourced with the wanted extras in $EXTRAS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }

find_python() {
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "embodyrl needs Python 3.11 or newer; install it, or name it with PYTHON=/path/to/python." >&2
    return 1
}

# Software rendering needs libOSMesa. With root it is installed; without, its package is named and the set-up goes on.
system_libraries() {
    if ldconfig -p 2>/dev/null | grep -q 'libOSMesa\.so'; then
        return
    fi
    local packages=(libosmesa6)
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        if sudo -n true 2>/dev/null; then as_root=(sudo); else as_root=(false); fi
    fi
    if [ "${as_root[0]:-}" = false ] || ! command -v apt-get >/dev/null; then
        say "missing system package: ${packages[*]} (no root here). Ask for: apt-get install ${packages[*]}"
        return
    fi
    say "installing system packages: ${packages[*]}"
    "${as_root[@]}" apt-get update -qq
    DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
}

python_packages() {
    local python
    python=$(find_python)
    [ -x .venv/bin/python ] || "$python" -m venv .venv || {
        echo "Cannot create .venv; on Debian and Ubuntu: apt-get install python3-venv" >&2
        return 1
    }
    local stamp=.venv/.embodyrl-installed
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ]; then
        return
    fi
    say "installing Python packages into .venv (3 GB, a few minutes)"
    # torch first: as a dependency of something else its CUDA build would be taken, several GB of it.
    .venv/bin/python -m pip install --quiet --constraint constraints.txt torch setuptools wheel
    .venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[$EXTRAS]"
    fingerprint >"$stamp"
}

fingerprint() { cat pyproject.toml constraints.txt scripts/setup.sh | sha256sum | cut -d' ' -f1; }

system_libraries
python_packages
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" LP_NUM_THREADS="${LP_NUM_THREADS:-1}"
export PATH="$PWD/.venv/bin:$PATH"
