# Shared by quickstart.sh and test.sh: makes .venv, installs embodyrl into it, and the system libraries that software
# rendering needs. Sourced (or run) with the wanted extras in $EXTRAS.
set -euo pipefail
EXTRAS="${EXTRAS:-}"
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

# LIBERO renders with libOSMesa, ManiSkill with lavapipe (Vulkan on the CPU). What cannot be installed is named, and the
# set-up goes on: the tests that need it are then skipped.
system_libraries() {
    if [[ $EXTRAS == *libero* ]] && ! ldconfig -p 2>/dev/null | grep -q 'libOSMesa\.so'; then
        install_packages libosmesa6 || say "LIBERO cannot render yet. Ask for: apt-get install libosmesa6"
    fi
    if [[ $EXTRAS == *dev* ]] && ! command -v chromedriver >/dev/null; then
        install_packages chromium chromium-driver || say "No browser for the tests of pages. Ask for: apt-get install chromium chromium-driver"
    fi
    if [[ $EXTRAS == *maniskill* ]] && ! lavapipe_works; then
        install_lavapipe && lavapipe_works || say "ManiSkill cannot start yet: it needs mesa-vulkan-drivers 25 or newer and libvulkan1"
    fi
}

install_packages() {
    local as_root=()
    [ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
    command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null || return 1
    say "installing system packages: $*"
    "${as_root[@]}" apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Older versions lack what SAPIEN asks of a Vulkan device.
lavapipe_works() {
    local version
    ldconfig -p 2>/dev/null | grep -q 'libvulkan\.so\.1' &&
        version=$(dpkg-query -W -f='${Version}' mesa-vulkan-drivers 2>/dev/null) &&
        dpkg --compare-versions "$version" ge 25
}

# Debian 12 has it in its backports, taken from the mirror that the machine uses already.
install_lavapipe() {
    local packages=(libvulkan1 mesa-vulkan-drivers) suite=bookworm-backports mirror
    if grep -qs '^VERSION_CODENAME=bookworm' /etc/os-release; then
        mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' | awk '$2 == "bookworm" { print $1; exit }')
        [ "$(id -u)" -eq 0 ] && [ -n "$mirror" ] || return 1
        echo "deb $mirror $suite main" >/etc/apt/sources.list.d/embodyrl-backports.list
        packages=(libvulkan1 {mesa-vulkan-drivers,libdrm2,libdrm-common,libdrm-amdgpu1}/$suite)
    fi
    install_packages "${packages[@]}"
}

# Which build of torch: CUDA where --cuda or a working driver asks for it, else the CPU's, which is ten times smaller.
torch_build() {
    case "${TORCH_BUILD:-}" in
        cpu) echo cpu ;;
        cuda) echo auto ;;
        *) nvidia-smi -L >/dev/null 2>&1 && echo auto || echo cpu ;;
    esac
}

python_packages() {
    local python stamp=".venv/.installed-${EXTRAS:-core}"
    python=$(find_python)
    [ -x .venv/bin/python ] || "$python" -m venv .venv || {
        echo "Cannot create .venv; on Debian and Ubuntu: apt-get install python3-venv" >&2
        return 1
    }
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ] && return
    say "installing Python packages into .venv: embodyrl${EXTRAS:+[$EXTRAS]} (a few minutes; 2 GB and more)"
    # torch first: as a dependency of something else a build would be taken that nobody chose.
    install_torch
    install --editable ".${EXTRAS:+[$EXTRAS]}"
    fingerprint >"$stamp"
}

# uv where it is, pip otherwise. Only uv knows the builds of torch by name, so pip fetches it for that.
install() {
    if command -v uv >/dev/null; then
        uv pip install --quiet --python .venv/bin/python --constraint constraints.txt "$@"
    else
        .venv/bin/python -m pip install --quiet --constraint constraints.txt "$@"
    fi
}

install_torch() {
    local build uv=uv
    .venv/bin/python -c "import torch" 2>/dev/null && return
    build=$(torch_build)
    command -v uv >/dev/null || { .venv/bin/python -m pip install --quiet uv && uv=.venv/bin/uv; } || true
    "$uv" pip install --quiet --python .venv/bin/python --constraint constraints.txt --torch-backend "$build" torch 2>.venv/torch.log ||
        torch_from_elsewhere "$build"
    install setuptools wheel
    say "torch $(.venv/bin/python -c 'import torch; print(torch.__version__, "for CUDA " + torch.version.cuda if torch.version.cuda else "for CPUs")' 2>/dev/null) (--cuda or --cpu chooses)"
}

# Where torch's own host cannot be reached. By pip, which also looks where its own settings say (PIP_FIND_LINKS, pip.conf).
torch_from_elsewhere() {
    local pip=(.venv/bin/python -m pip install --quiet --constraint constraints.txt)
    "${pip[@]:0:3}" --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null
    if [ "$1" = cpu ]; then
        "${pip[@]}" "$(grep '^torch==' constraints.txt)+cpu" 2>>.venv/torch.log && return
        say "torch's build for CPUs cannot be fetched (.venv/torch.log). The one of your package index comes instead, for CUDA as a rule: 3 GB to download. It runs without a GPU too. Ctrl-C ends this; PIP_FIND_LINKS=FOLDER takes a wheel from there"
    else
        say "torch's own host cannot be reached (.venv/torch.log); taking the build of your package index: 3 GB for CUDA"
    fi
    "${pip[@]}" torch
}

fingerprint() { cat pyproject.toml constraints.txt scripts/setup.sh | sha256sum | cut -d' ' -f1; }

system_libraries
python_packages
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" LP_NUM_THREADS="${LP_NUM_THREADS:-1}"
export PATH="$PWD/.venv/bin:$PATH"
