#!/usr/bin/env bash
# Install what the tests need, the S3 server included, and run them all.
#   ./scripts/test.sh [PYTEST ARGUMENTS]
#   CASTORE_VENV=DIR         use this virtual environment as it is; nothing is installed
#   CASTORE_TEST_PROCESSES=N how many processes run tests (4): most wait for disk or server
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/lib.sh

venv=${CASTORE_VENV:-.venv}
if [ -z "${CASTORE_VENV:-}" ]; then
    make_venv "$venv" dev
fi
venv=$(cd "$venv" && pwd)
export PATH="$venv/bin:$PATH"
# Several processes share the cores: threads of each would spin for them (a sixth of the time).
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
say "running the tests"
# A process that is done takes tests of the others: else one ends alone with the slow last ones.
exec "$venv/bin/python" -m pytest -q -n "${CASTORE_TEST_PROCESSES:-4}" --dist worksteal "$@"
