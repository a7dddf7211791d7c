#!/usr/bin/env bash
# Make or update a virtual environment with the pinned requirements and this checkout, editable.
#
#   scripts/make_venv.sh FOLDER PYTHON TORCH
#
# FOLDER may exist: what is pinned is then brought to its pin and the rest left alone, unless an
# earlier run of this script was killed or failed half-way. That one is made anew, since pip takes a
# half-unpacked package for an installed one.
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
  *) fail "TORCH=$torch names no version; give torch==X.Y.Z or a wheel" ;;
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
  step "bringing $venv up to date"
  touch "$unfinished"
fi

# Byte-compiling all of torch takes longer than unpacking it, and most of it is never imported.
install() { "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile "$@"; }

requires_triton='
import sys
from importlib import metadata
sys.exit(not any(each.startswith("triton") for each in metadata.requires("torch") or ()))
'

step "$torch"
install "$torch" -c "$root/requirements/tools.txt"
step "tests, lint and demo"
install --no-deps -r "$root/requirements/tools.txt" -r "$root/requirements/demo.txt"
if "$venv/bin/python" -c "$requires_triton"; then
  step "Triton is the one that torch requires"
else
  step "Triton"
  install --no-deps -r "$root/requirements/triton.txt"
fi
step "inductor_ext"
install --no-deps --no-build-isolation -e "$root"
rm "$unfinished"
step "ready"
