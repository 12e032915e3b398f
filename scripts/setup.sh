#!/usr/bin/env bash
# Installs what a build needs and is missing: Debian packages, .venv, Python packages.
#
#   scripts/setup.sh build   compiler, CMake, libraries; .venv with torch and scripts/requirements.txt
#   scripts/setup.sh lint    the same and clang-format, clang-tidy
#
# PYTHON  the interpreter that .venv is made from (default python3)
# TORCH   the requirement given to pip when .venv has no torch (default torch>=2.13,<2.14)
# CUDA    ON: installs nvcc into .venv (scripts/requirements-cuda.txt) if this machine has none
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
torch="${TORCH:-torch>=2.13,<2.14}"
venv="$PWD/.venv"

die() {
  echo "setup: $*" >&2
  exit 1
}

wanted_packages() {
  echo cmake ninja-build libhwy-dev libgtest-dev libbenchmark-dev libfmt-dev nlohmann-json3-dev
  command -v c++ >/dev/null || echo g++
  # An interpreter from elsewhere brings its own venv module and headers.
  case "$(readlink -f "$(command -v "$python")")" in
    /usr/bin/*) echo python3-venv python3-dev ;;
  esac
  if [ "$1" = lint ]; then
    echo clang-format clang-tidy
  fi
}

install_packages() {
  local missing=() package status
  for package in $(wanted_packages "$1"); do
    status="$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)"
    [ "$status" = installed ] || missing+=("$package")
  done
  [ "${#missing[@]}" -eq 0 ] && return
  echo "setup: installing Debian packages: ${missing[*]}"
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null ||
      die "these Debian packages are missing and there is neither root nor sudo to install them;" \
        "as root, run: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  # A failing update may still leave a usable list, so only the install decides.
  "${as_root[@]}" apt-get update -qq || true
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
    die "apt-get could not install: ${missing[*]}; install them by hand and run make again"
}

# Lets .venv import python/ and gives it the command `tide`, without an installed copy.
link_checkout() {
  local site
  site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  echo "$PWD/python" >"$site/tide-checkout.pth"
  # The guard matters: processes that a bench spawns import this script again.
  printf '#!%s\nimport sys\n\nfrom tide.cli import main\n\nif __name__ == "__main__":\n    sys.exit(main())\n' \
    "$venv/bin/python" >"$venv/bin/tide"
  chmod +x "$venv/bin/tide"
}

install_python() {
  local stamp="$venv/tide-setup.stamp" wanted
  # A moved checkout, another requirement or a changed script make the stamp old.
  wanted="$PWD $torch $(cat scripts/requirements.txt scripts/setup.sh | cksum)"
  if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
    return
  fi
  if [ ! -x "$venv/bin/python" ]; then
    echo "setup: making .venv with $("$python" --version)"
    "$python" -m venv "$venv" || die "$python -m venv failed; set PYTHON= to a Python >= 3.10"
  fi
  local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
  if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    echo "setup: installing $torch"
    "${pip[@]}" "$torch" ||
      die "pip could not install '$torch'; set TORCH= to a requirement that pip can reach here"
  fi
  echo "setup: installing scripts/requirements.txt"
  "${pip[@]}" -r scripts/requirements.txt || die "pip could not install scripts/requirements.txt"
  link_checkout
  echo "$wanted" >"$stamp"
}

# What cmake/TideCuda.cmake finds.
has_nvcc() {
  local nvcc
  for nvcc in "$(command -v nvcc)" /usr/local/cuda/bin/nvcc \
    "$venv"/lib/python3*/site-packages/nvidia/cu*/bin/nvcc; do
    [ ! -x "$nvcc" ] || return 0
  done
  return 1
}

has_gpu() { nvidia-smi -L >/dev/null 2>&1; }

# AUTO installs nvcc where there is a GPU to use, and does without where that fails.
install_cuda() {
  local cuda="${CUDA:-AUTO}"
  if [ "$cuda" = OFF ] || has_nvcc || { [ "$cuda" = AUTO ] && ! has_gpu; }; then
    return
  fi
  echo "setup: installing scripts/requirements-cuda.txt"
  if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    -r scripts/requirements-cuda.txt; then
    local advice="pip could not install nvcc; install the CUDA toolkit 12.1 or newer"
    [ "$cuda" = AUTO ] || die "$advice, or set CUDA=OFF"
    echo "setup: $advice; the CUDA part is left out" >&2
  fi
}

# Headers for the nccl fabric (cmake/TideNccl.cmake). The library in the wheel is not needed here.
nccl_headers="${XDG_CACHE_HOME:-$HOME/.cache}/tide/nccl-headers"

install_nccl_headers() {
  if [ "${CUDA:-AUTO}" = OFF ] || ! has_nvcc || [ -f "$nccl_headers/nccl_device/host.h" ]; then
    return
  fi
  echo "setup: fetching NCCL's headers into $nccl_headers"
  local folder
  folder="$(mktemp -d)"
  if "$venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps \
    --only-binary=:all: --dest "$folder" 'nvidia-nccl-cu13>=2.31.2' &&
    "$venv/bin/python" scripts/unpack_headers.py "$folder"/*.whl nvidia/nccl/include "$nccl_headers"; then
    :
  else
    echo "setup: NCCL's headers could not be fetched; the nccl fabric is left out" >&2
  fi
  rm -rf "$folder"
}

mode="${1:-build}"
case "$mode" in
  build | lint) ;;
  *) die "expected 'build' or 'lint', got '$mode'" ;;
esac
command -v "$python" >/dev/null || die "no interpreter '$python'; set PYTHON= to a Python >= 3.10"
install_packages "$mode"
install_python
install_cuda
install_nccl_headers
