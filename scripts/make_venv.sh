#!/usr/bin/env bash
# Make or update a virtual environment with the pinned requirements and this checkout, editable.
#
#   scripts/make_venv.sh FOLDER PYTHON TORCH
#
# If FOLDER exists, pinned packages are updated to their pins and others are kept, unless an earlier
# run of this script was interrupted. The folder is then created again, because pip considers a
# partly unpacked package as installed.
set -euo pipefail

venv=$1 python=$2 torch=$3
root=$(cd "$(dirname "$0")/.." && pwd)
unfinished=$venv/.unfinished

step() { printf '==> %s (%d s)\n' "$*" "$SECONDS"; }
fail() {
  printf 'make_venv: %s\n' "$*" >&2
  exit 1
}

case $torch in
  *==* | *.whl) ;;
  *) fail "TORCH=$torch has no version; use torch==X.Y.Z or a wheel" ;;
esac
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' ||
  fail "$python is not Python 3.11 to 3.14, for which the requirements are pinned; set PYTHON"

if [ -e "$unfinished" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
  step "new virtual environment in $venv"
  rm -rf "$venv"
  mkdir -p "$venv"
  touch "$unfinished"
  "$python" -m venv "$venv"
else
  step "updating $venv"
  touch "$unfinished"
fi

# Byte-compiling torch takes longer than unpacking it, and most of it is never imported.
install() { "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile "$@"; }

requires_triton='
import sys
from importlib import metadata
sys.exit(not any(name.startswith("triton") for name in metadata.requires("torch") or ()))
'

step "$torch"
install "$torch" -c "$root/requirements/tools.txt"
step "tests, lint, demo, examples and documentation"
install --no-deps -r "$root/requirements/tools.txt" -r "$root/requirements/demo.txt" \
  -r "$root/requirements/examples.txt" -r "$root/requirements/docs.txt"
install --no-deps --upgrade --target "$venv/torchao" -r "$root/requirements/torchao.txt"
if "$venv/bin/python" -c "$requires_triton"; then
  step "keeping the Triton that torch requires"
else
  step "Triton"
  install --no-deps -r "$root/requirements/triton.txt"
fi
step "inductor_ext"
install --no-deps --no-build-isolation -e "$root"
rm "$unfinished"
step "ready"
