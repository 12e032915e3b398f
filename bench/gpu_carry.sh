#!/usr/bin/env bash
# Packs what a GPU machine without package registries lacks into build/carry: the libraries that
# TIDE builds on, as installed here. Copy the checkout with that folder there, and run
# bench/gpu_run.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

carry="${1:-build/carry}"
packages=(libfmt-dev libfmt9 nlohmann-json3-dev libhwy-dev libhwy1 libgtest-dev libbenchmark-dev
  libbenchmark1debian)

rm -rf "$carry"
mkdir -p "$carry"
for package in "${packages[@]}"; do
  files="$(dpkg -L "$package")" || {
    echo "gpu_carry: $package is not installed: run make setup" >&2
    exit 1
  }
  # Headers, libraries and CMake's descriptions of them; links stay links.
  grep -E '^/usr/(include|lib|share/cmake)/' <<<"$files" | while IFS= read -r file; do
    if [ -L "$file" ] || [ -f "$file" ]; then echo "${file#/}"; fi
  done | tar -C / -cf - -T - | tar -C "$carry" -xf -
done
du -sh "$carry"
