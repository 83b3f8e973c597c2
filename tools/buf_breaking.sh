#!/usr/bin/env bash
# Says whether protos/ breaks those of a base: $BASE, else the remote's main. Without a base there is nothing to break.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${BASE:-origin/main}
if ! git rev-parse -q --verify "$base:protos" >/dev/null; then
  echo "buf breaking: no $base with protos/ to compare with, skipped"
  exit 0
fi
old=$(mktemp -d)
trap 'rm -rf "$old"' EXIT
git archive "$base" protos | tar -x -C "$old"
cd protos
../.venv/bin/buf breaking --against "$old/protos"
