"""Run FBGEMM_GPU's own tests of its training modules against the drop-in, or against its own to compare.

    python ci/fbgemm_tests.py PATH [--original] [pytest's arguments]

PATH is ``fbgemm_gpu/test`` in a checkout of FBGEMM. Needs ``fbgemm_gpu`` installed: its tests make their inputs
and references with it. The checks that FBGEMM generates of its own operators are left out.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import fbgemm_gpu.split_table_batched_embeddings_ops_training as training
import pytest

FILES = (
    "backward_adagrad_test.py",
    "backward_dense_test.py",
    "backward_determinism_test.py",
    "backward_none_test.py",
    "backward_optimizers_test.py",
    "backward_sgd_test.py",
    "forward_test.py",
)
GENERATED = "not (test_schema__ or test_autograd_registration__ or test_faketensor__ or test_aot_dispatch_)"


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    root, rest = Path(arguments[0]).resolve(), arguments[1:]
    folder = root / "tbe" / "training"
    if not folder.is_dir():
        print(f"{folder}: expected FBGEMM's tests of training", file=sys.stderr)
        return 2
    if "--original" in rest:
        rest.remove("--original")
    else:
        import tbe.compat.fbgemm as ours

        for name in ("SplitTableBatchedEmbeddingBagsCodegen", "DenseTableBatchedEmbeddingBagsCodegen"):
            setattr(training, name, getattr(ours, name))
    sys.path.append(str(root))  # for its test_utils; last, since it has a package named tbe as well
    with tempfile.TemporaryDirectory() as scratch:
        # Under another name: in a package named tbe the tests' relative imports would find this library.
        package = Path(scratch) / "fbgemm_tbe_tests"
        package.symlink_to(root / "tbe", target_is_directory=True)
        files = [str(package / "training" / name) for name in FILES]
        options = [f"--rootdir={scratch}", "-p", "no:cacheprovider", "-o", "addopts=", "-k", GENERATED]
        return int(pytest.main([*options, *files, *rest]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
