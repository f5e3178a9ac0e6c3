#!/usr/bin/env bash
# Install what the tests need, the S3 server included, and run them all.
#   ./scripts/test.sh [PYTEST ARGUMENTS]
#   CASTORE_VENV=DIR  use this virtual environment as it is; nothing is installed
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/lib.sh

venv=${CASTORE_VENV:-.venv}
if [ -z "${CASTORE_VENV:-}" ]; then
    make_venv "$venv" dev
fi
venv=$(cd "$venv" && pwd)
export PATH="$venv/bin:$PATH"
say "running the tests"
exec "$venv/bin/python" -m pytest -q "$@"
