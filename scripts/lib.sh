# Shared by the scripts here; sourced, not run.
# Finds Python 3.11 to 3.13, makes or reuses a virtual environment, installs into it.

say() { printf '\n==> %s\n' "$*" >&2; }

# The first Python of a supported version on PATH.
find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
            2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "no Python 3.11, 3.12 or 3.13 found on PATH" >&2
    return 1
}

# make_venv FOLDER EXTRAS [PACKAGE...]: install the project with EXTRAS, once for what is pinned.
make_venv() {
    local venv=$1 extras=$2 stamp python
    shift 2
    stamp=$(cat pyproject.toml constraints.txt <(echo "$extras $*") | sha256sum | cut -c1-64)
    if [ "$(cat "$venv/.installed-$extras" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    if [ ! -x "$venv/bin/python" ]; then
        python=$(find_python)
        say "making $venv with $("$python" --version)"
        "$python" -m venv "$venv" || {
            echo "could not make a virtual environment (on Debian: apt install python3-venv)" >&2
            return 1
        }
    fi
    # torch first and by its exact version: an open range brings gigabytes of CUDA.
    say "installing torch"
    "$venv/bin/python" -m pip install --disable-pip-version-check \
        -c constraints.txt torch==2.13.0
    say "installing castore[$extras] $*"
    "$venv/bin/python" -m pip install --disable-pip-version-check \
        -c constraints.txt -e ".[$extras]" "$@"
    echo "$stamp" >"$venv/.installed-$extras"
}
