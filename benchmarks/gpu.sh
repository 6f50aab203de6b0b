#!/bin/sh
# Measure a capture and the loader on one GPU: benchmarks/gpu.sh [--tiny] [--place DIR], see benchmarks/gpu.py.
#
# $PYTHON decides when it is set: an unsuitable one is an error. Otherwise the first of .venv's, those on PATH and pyenv's
# that is 3.12 or newer and has what dspark-store needs, torch included; nothing is installed.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1

suits() {
    "$1" -c 'import importlib.util, sys
needed = ("torch", "transformers", "numpy", "zarr", "numcodecs", "crc32c", "dask", "jinja2", "tqdm", "yaml")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
sys.exit(sys.version_info < (3, 12) or bool(missing))' 2>/dev/null </dev/null
}

if [ -n "${PYTHON:-}" ]; then
    suits "$PYTHON" && exec "$PYTHON" -m benchmarks.gpu "$@"
    echo "PYTHON=$PYTHON is not a Python >= 3.12 with what dspark-store needs: name another, or unset PYTHON" >&2
    exit 2
fi
for name in "$root/.venv/bin/python" python3.14 python3.13 python3.12 python3 "${HOME:-}"/.pyenv/versions/3.1[2-9]*/bin/python; do
    suits "$name" && exec "$name" -m benchmarks.gpu "$@"
done
echo "found no Python >= 3.12 with torch and what else dspark-store needs: run make lint once, or name one in PYTHON" >&2
exit 2
