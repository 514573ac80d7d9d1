"""Run FBGEMM_GPU's own tests of its training modules against the drop-in, or against its own to compare.

    python ci/fbgemm_tests.py PATH [--original] [pytest's arguments]

PATH is ``fbgemm_gpu/test`` in a checkout of FBGEMM. Needs ``fbgemm_gpu`` installed: its tests make their inputs
and references with it. The checks that FBGEMM generates of its own operators are left out.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

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


class Calls:
    """Counts each test's calls of the modules: some tests return before they make one, and pass."""

    def __init__(self, modules: list[Any]) -> None:
        self.now, self.of = 0, dict[str, int]()
        for module in modules:
            self._count(module)

    def _count(self, module: Any) -> None:
        forward = module.forward

        @functools.wraps(forward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.now += 1
            return forward(*args, **kwargs)

        module.forward = counted

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        self.now = 0
        yield
        self.of[item.nodeid] = self.now

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for outcome in ("passed", "failed"):
            for report in terminalreporter.getreports(outcome):
                if report.when == "call":
                    name = report.nodeid.rpartition("/")[2]
                    terminalreporter.write_line(f"{outcome}, {self.of[report.nodeid]} calls: {name}")


NAMES = ("SplitTableBatchedEmbeddingBagsCodegen", "DenseTableBatchedEmbeddingBagsCodegen")


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

        for name in NAMES:
            setattr(training, name, getattr(ours, name))
    calls = Calls([getattr(training, name) for name in NAMES])
    sys.path.append(str(root))  # for its test_utils; last, since it has a package named tbe as well
    with tempfile.TemporaryDirectory() as scratch:
        # Under another name: in a package named tbe the tests' relative imports would find this library.
        package = Path(scratch) / "fbgemm_tbe_tests"
        package.symlink_to(root / "tbe", target_is_directory=True)
        files = [str(package / "training" / name) for name in FILES]
        options = [f"--rootdir={scratch}", "-p", "no:cacheprovider", "-o", "addopts=", "-k", GENERATED]
        return int(pytest.main([*options, *files, *rest], plugins=[calls]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
