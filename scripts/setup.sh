#!/usr/bin/env bash
# Make .venv/ fit pyproject.toml. Does nothing when it already does (the stamp holds the file's hash).
#
# torch is installed by name and version first: without that, a range in a dependency list may pull a build
# for accelerators that is several gigabytes larger. PYTHON=... picks the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
STAMP="$VENV/.nvrx-sre-setup"
TORCH="${TORCH:-torch==2.13.0}"

want="$(sha256sum pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1) $TORCH $(pwd -P)"
if [ -x "$VENV/bin/nvrx-sre" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$want" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    echo "setup: no Python 3.11, 3.12 or 3.13 found; install one (Debian: apt-get install python3 python3-venv) or set PYTHON=" >&2
    return 1
}

if ! "$VENV/bin/python" -c '' 2>/dev/null || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    python="$(find_python)"
    echo "setup: creating $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV" || {
        echo "setup: cannot create $VENV; on Debian: apt-get install python3-venv" >&2
        exit 1
    }
fi

pip=("$VENV/bin/python" -m pip --disable-pip-version-check --no-input install --quiet)
echo "setup: installing $TORCH"
"${pip[@]}" "$TORCH"
echo "setup: installing nvrx-sre and its test tools"
"${pip[@]}" -e '.[test]'
echo "$want" >"$STAMP"
