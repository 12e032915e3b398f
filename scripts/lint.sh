#!/usr/bin/env bash
# Checks (scripts/lint.sh) or repairs (scripts/lint.sh --fix) format and style of C++ and Python.
# clang-tidy reads build/compile_commands.json, so run it through `make lint`.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv/bin
build="${BUILD:-build}"
jobs="${JOBS:-$(nproc)}"

# Tracked and new files, ignored ones left out; a file removed but not yet committed is skipped.
list() {
  git ls-files -z --cached --others --exclude-standard -- "$@" |
    while IFS= read -r -d '' file; do
      [ ! -f "$file" ] || printf '%s\0' "$file"
    done
}

python_folders=()
for folder in python tests scripts bench examples; do
  if [ -n "$(list "$folder/*.py" | tr -d '\0')" ]; then
    python_folders+=("$folder")
  fi
done

if [ "${1:-}" = --fix ]; then
  list '*.h' '*.cc' '*.cu' '*.cuh' | xargs -0 -r clang-format -i
  "$venv/ruff" check --fix --quiet "${python_folders[@]}" || true
  "$venv/ruff" format --quiet "${python_folders[@]}"
  exit
fi

failed=()
step() {
  local name="$1"
  shift
  echo "lint: $name"
  "$@" || failed+=("$name")
}

format_check() { list '*.h' '*.cc' '*.cu' '*.cuh' | xargs -0 -r clang-format --dry-run --Werror; }

# Warnings of system headers are counted on stderr; only findings in our tree are of interest.
# -Wno-unknown-warning-option: the database was written for another compiler.
tidy_check() {
  list 'src/*.cc' 'bindings/*.cc' | grep -zv 'torch_storage\.cc$' |
    xargs -0 -r -n 1 -P "$jobs" clang-tidy -p "$build" --quiet \
      --extra-arg=-Wno-unknown-warning-option 2> >(grep -v ' warnings\? generated' >&2 || true)
}

step clang-format format_check
step clang-tidy tidy_check
step 'ruff check' "$venv/ruff" check "${python_folders[@]}"
step 'ruff format' "$venv/ruff" format --check "${python_folders[@]}"
if [ "${#failed[@]}" -gt 0 ]; then
  echo "lint: failed: ${failed[*]} (make format repairs what can be repaired)" >&2
  exit 1
fi
echo "lint: clean"
