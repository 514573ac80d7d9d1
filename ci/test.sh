#!/usr/bin/env bash
# Lint, types and tests: what developers and machines run.
# Usage: ci/test.sh [torchrec|lint|types|docs|cpu|interpret|compile ...]
# Without arguments: all of them. TBE_CRITEO_SAMPLE may name a file of real Criteo rows for the trainer's tests.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
jobs=${TBE_TEST_JOBS:-2}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Its package asks for FBGEMM's CUDA build, 465 MB that would overwrite the CPU build: so without what it asks for.
torchrec() { "$python" -c "import torchrec" 2> /dev/null || "$python" -m pip install -q --no-deps -c constraints.txt torchrec ; }
lint() { "$python" -m ruff check . ; }
types() { "$python" -m mypy ; }
# The site, in site/: a page left out of it, a broken link or anchor, a docstring that cannot be read is an error.
docs() { NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict ; }
cpu() { "$python" -m pytest -q -n "$jobs" -m "not compile" "$@" ; }
interpret() { TRITON_INTERPRET=1 "$python" -m pytest -q -n "$jobs" -m values "$@" ; }
compile() { "$python" -m pytest -q -m compile "$@" ; }

if [ $# -eq 0 ]; then set -- torchrec lint types docs interpret compile cpu; fi
for part in "$@"; do
    echo "== $part"
    "$part"
done
