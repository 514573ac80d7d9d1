"""TorchRec's models over this library's kernels: as over its own, and as the fp64 reference says."""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec_worker as worker
from helpers import ROOT, environment, python
from torchrec_worker import CASES, STEPS, WORLD, Case

import tbe
from tbe_core import Layout, Spec, tolerances
from tbe_core.reference import Reference

try:
    import torchrec
except (ImportError, OSError) as error:
    torchrec, WHY = None, f"torchrec cannot be imported: {error}"
else:
    WHY = ""
needs_torchrec = pytest.mark.skipif(torchrec is None, reason=WHY)
OURS = "tbe.compat.torchrec.kernels."
OPTIMIZERS = {
    "EXACT_SGD": tbe.SGD(lr=worker.LR),
    "EXACT_ROWWISE_ADAGRAD": tbe.RowwiseAdagrad(lr=worker.LR),
    "EXACT_ADAGRAD": tbe.Adagrad(lr=worker.LR, eps=1e-8),
    "ADAM": tbe.Adam(lr=worker.LR),
}


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found; one run of the worker serves every process of the tests."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if shared.name.startswith("popen-") else shared
    folder = shared / "torchrec"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "1.pt").exists():
            done = subprocess.run(
                [sys.executable, "-W", "ignore", worker.__file__, str(folder)],
                env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def optimizer_name(case: Case) -> str:
    return OPTIMIZERS[case.optimizer].NAME


def bounds(case: Case) -> tuple[float, float]:
    """Of outputs and tables, and of optimizer state."""
    dtype = torch.float16 if case.half else torch.float32
    name = optimizer_name(case)
    return max(tolerances.weights(name, dtype), tolerances.forward(dtype, torch.float32)), tolerances.state(name)


def assert_same(case: Case, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Losses and outputs of every step; tables, optimizer state and names at the end."""
    near, state = bounds(case)
    assert mine["losses"] == pytest.approx(theirs["losses"], rel=near, abs=near)
    for left, right in zip(mine["outs"], theirs["outs"], strict=True):
        torch.testing.assert_close(left, right, rtol=near, atol=near)
    for kind, bound in (("tables", near), ("states", state)):
        assert sorted(mine[kind]) == sorted(theirs[kind])
        for name, parts in mine[kind].items():
            other = theirs[kind][name]
            assert [at for at, _ in parts] == [at for at, _ in other], name
            for (_, left), (_, right) in zip(parts, other, strict=True):
                torch.testing.assert_close(left, right, rtol=bound, atol=bound, msg=lambda m, n=name: f"{n}: {m}")
    assert mine["parameters"] == theirs["parameters"]


class Unit:
    """A table, or one of its column shards, which TorchRec's row-wise optimizers step on its own."""

    def __init__(self, case: Case, table: int, columns: slice) -> None:
        self.table, self.columns = table, columns
        rows, width = worker.ROWS[table], columns.stop - columns.start
        pooling = "none" if case.sequence else "mean" if table in case.mean else "sum"
        layout = Layout.make([tbe.Table("t", rows, width)], [0] * len(worker.FEATURES[table]))
        spec = Spec(layout, OPTIMIZERS[case.optimizer], pooling, torch.float32, torch.float32, "error")
        first = worker.start(table, case.dims[table])[:, columns]
        first = first.half() if case.half else first
        state = {
            s.name: torch.zeros(rows, *([] if s.kind == "row" else [width])) for s in spec.optimizer.STATE
        }
        self.reference = Reference.of(spec, [first], [state])


def units(case: Case) -> list[Unit]:
    cut = [case.sharding == "column_wise" or (case.sharding == "mixed" and table == 0) for table in range(3)]
    return [
        Unit(case, table, slice(begin, begin + width))
        for table, dim in enumerate(case.dims)
        for width in [dim // 2 if cut[table] else dim]
        for begin in range(0, dim, width)
    ]


def expanded(case: Case, found: worker.Batch) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Per feature: ids and weights of each sample; with variable batches samples share bags."""
    features = []
    for feature, (lengths, values, weights) in enumerate(found.per_feature()):
        ids, factors = values.split(lengths.tolist()), weights.split(lengths.tolist())
        order = found.inverse[feature].tolist() if case.variable else range(len(ids))
        features.append(([ids[bag] for bag in order], [factors[bag] for bag in order]))
    return features


def reference_step(case: Case, parts: Sequence[Unit], step: int) -> list[torch.Tensor]:
    """One step of both ranks; returns each rank's output."""
    ranks = [expanded(case, worker.batch(case, step, rank)) for rank in range(WORLD)]
    per_unit: list[tuple[list[list[torch.Tensor]], tuple[Any, ...]]] = []
    first = [0, 2, 3]
    for unit in parts:
        numbers = range(first[unit.table], first[unit.table] + len(worker.FEATURES[unit.table]))
        bags = [bag for f in numbers for rank in ranks for bag in rank[f][0]]
        factors = torch.cat([bag for f in numbers for rank in ranks for bag in rank[f][1]])
        lengths = torch.tensor([len(bag) for bag in bags])
        call = (
            torch.cat(bags), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            factors if case.weighted else None,
        )  # fmt: skip
        out = unit.reference.forward(*call)
        pieces: list[list[torch.Tensor]] = [[], []]  # per rank: one a feature
        if case.sequence:
            counts = [sum(len(bag) for bag in rank[f][0]) for f in numbers for rank in ranks]
            for n, piece in enumerate(out.split(counts)):
                pieces[n % WORLD].append(piece)
        else:
            for piece in out.split(unit.columns.stop - unit.columns.start, dim=1):
                for rank, half in enumerate(piece.split(worker.BATCH)):
                    pieces[rank].append(half)
        per_unit.append((pieces, call))

    def order() -> list[tuple[int, int]]:
        """(unit, feature of it) as the output has them: a feature's columns side by side."""
        return [
            (u, f)
            for table in range(3)
            for f in range(len(worker.FEATURES[table]))
            for u, unit in enumerate(parts)
            if unit.table == table
        ]

    outs, grads = [], []
    for rank in range(WORLD):
        if case.sequence:
            found: dict[tuple[int, int], list[torch.Tensor]] = {}
            for u, f in order():
                found.setdefault((parts[u].table, f), []).append(per_unit[u][0][rank][f])
            out = torch.cat([torch.cat(columns, dim=1) for columns in found.values()])
        else:
            out = torch.cat([per_unit[u][0][rank][f] for u, f in order()], dim=1)
        outs.append(out)
        # TorchRec divides gradients by the number of ranks.
        grads.append((out + worker.target(out.shape, step, rank).double()) / WORLD)
    lr = worker.LATER_LR if step >= 2 else worker.LR
    by_unit: dict[int, list[torch.Tensor]] = {u: [] for u in range(len(parts))}
    at = [0] * WORLD
    if case.sequence:
        for table in range(3):
            for f in range(len(worker.FEATURES[table])):
                mine = [u for u, unit in enumerate(parts) if unit.table == table]
                for rank in range(WORLD):
                    n = len(per_unit[mine[0]][0][rank][f])
                    for u in mine:
                        by_unit[u].append(grads[rank][at[rank] : at[rank] + n, parts[u].columns])
                    at[rank] += n
        whole = {u: torch.cat(pieces) for u, pieces in by_unit.items()}
    else:
        for u, _ in order():
            width = parts[u].columns.stop - parts[u].columns.start
            by_unit[u].append(torch.cat([grad[:, at[0] : at[0] + width] for grad in grads]))
            at[0] += width
        whole = {u: torch.cat(pieces, dim=1) for u, pieces in by_unit.items()}
    for u, unit in enumerate(parts):
        hyper = [lr, *unit.reference.spec.optimizer.hyper_values()[1:]]
        unit.reference.backward_update(whole[u], *per_unit[u][1], hyper, step + 1)
    return outs


def column_of(case: Case, parts: Sequence[Unit], table: int, at: tuple[int, ...]) -> tuple[Unit, int]:
    """The unit of a shard, and its first row there."""
    mine = [unit for unit in parts if unit.table == table]
    if len(at) == 2:
        return next(unit for unit in mine if unit.columns.start == at[1]), at[0]
    # Row-wise state of column shards: one after another.
    return mine[at[0] // worker.ROWS[table] if len(mine) > 1 else 0], at[0] % worker.ROWS[table]


@needs_torchrec
@pytest.mark.parametrize("name", CASES)
def test_as_the_reference(name: str, results: list[dict[str, Any]]) -> None:
    case = CASES[name]
    near, bound = bounds(case)
    parts = units(case)
    found = [rank["cases"][name]["tbe"] for rank in results]
    for step in range(STEPS):
        for rank, out in enumerate(reference_step(case, parts, step)):
            torch.testing.assert_close(found[rank]["outs"][step].double(), out, rtol=near, atol=near)
    seen = 0
    for rank in found:
        for key, shards in rank["tables"].items():
            table = int(key.split(".")[-2][1:])
            for at, view in shards:
                unit, row = column_of(case, parts, table, at)
                wanted = unit.reference.tables[0][row : row + view.shape[0]]
                torch.testing.assert_close(view.double(), wanted, rtol=near, atol=near)
                seen += view.numel()
        for key, shards in rank["states"].items():
            name_of_table, state = key.split("/")[1].split(".")
            table = int(name_of_table[1:])
            for at, view in shards:
                unit, row = column_of(case, parts, table, at)
                (states,) = unit.reference.states
                values = states["exp_avg_sq" if state == "exp_avg_sq" else next(iter(states))]
                torch.testing.assert_close(
                    view.double(), values[row : row + view.shape[0]], rtol=bound, atol=bound
                )
    copies = WORLD if case.sharding == "data_parallel" else 1
    elements = sum(r * d for r, d in zip(worker.ROWS, case.dims, strict=True))
    assert seen == copies * elements, "every element judged"


@needs_torchrec
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.theirs])
def test_as_torchrecs_own_kernels(name: str, results: list[dict[str, Any]]) -> None:
    for rank in results:
        mine, theirs = rank["cases"][name]["tbe"], rank["cases"][name]["fbgemm"]
        assert all(kind.startswith(OURS) for kind in mine["kernels"]) and mine["kernels"]
        assert all(kind.startswith("fbgemm_gpu.") for kind in theirs["kernels"]) and theirs["kernels"]
        assert_same(CASES[name], mine, theirs)


@needs_torchrec
def test_checkpoints_move_both_ways(results: list[dict[str, Any]]) -> None:
    """Resumed under another kernel, and another sharding, training goes on as if it had never stopped."""
    case = Case("row_wise")
    near, _ = bounds(case)
    for rank in results:
        assert len(rank["checkpoints"]) == 8
        for name, (straight, resumed) in rank["checkpoints"].items():
            assert resumed["kernels"][0].startswith(OURS) == ("to tbe" in name)
            assert resumed["losses"] == pytest.approx(straight["losses"], rel=near), name
            if "row_wise" in name:
                assert_same(case, resumed, straight)


@needs_torchrec
def test_adam_resumes_with_its_step_count(results: list[dict[str, Any]]) -> None:
    for rank in results:
        straight, resumed = rank["adam resumes"]
        assert resumed["losses"] == straight["losses"]


@needs_torchrec
def test_models_go_on_outside_and_others_inside(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["left alone"]
        kernels = {name: run["kernels"][0].split(".")[0] for name, run in found.items()}
        assert kernels == {
            "theirs, used inside": "fbgemm_gpu", "ours, used outside": "tbe", "theirs, made after": "fbgemm_gpu",
        }  # fmt: skip
        for run in found.values():
            assert_same(CASES["variable-weighted"], run, found["theirs, made after"])


@needs_torchrec
def test_planned_by_torchrec(results: list[dict[str, Any]]) -> None:
    for rank in results:
        mine, theirs = rank["planned"]["tbe"], rank["planned"]["fbgemm"]
        assert mine["kernels"][0].startswith(OURS) and theirs["kernels"][0].startswith("fbgemm_gpu.")
        assert_same(Case(), mine, theirs)


@needs_torchrec
def test_installations_nest_and_are_undone() -> None:
    import torchrec.distributed.batched_embedding_kernel as kernel
    import torchrec.distributed.embedding_lookup as lookup

    import tbe.compat.torchrec as compat
    from tbe.compat.torchrec import seam

    before = dict(vars(kernel)), dict(vars(lookup))
    outer = compat.install()
    inner = compat.install()
    with pytest.raises(RuntimeError, match="later install"):
        outer.close()
    assert outer.active and inner.active
    inner.close()
    assert kernel.SplitTableBatchedEmbeddingBagsCodegen is not before[0]["SplitTableBatchedEmbeddingBagsCodegen"]
    with pytest.raises(NotImplementedError, match="FULLY_SHARDED"):
        lookup.ShardedBatchedFusedEmbeddingBag()
    outer.close()
    outer.close()
    with pytest.raises(ZeroDivisionError), compat.install():
        1 / 0  # noqa: B018
    assert (dict(vars(kernel)), dict(vars(lookup))) == before
    assert seam._installed == []


@needs_torchrec
def test_what_is_not_served_is_refused_by_name() -> None:
    from tbe.compat.fbgemm import ComputeDevice, EmbeddingLocation, SparseType
    from tbe.compat.torchrec.kernels import SplitTableBatchedEmbeddingBagsCodegen

    spec = [(4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]
    with pytest.raises(NotImplementedError, match="weights_precision"):
        SplitTableBatchedEmbeddingBagsCodegen(spec, weights_precision=SparseType.INT8)
    managed = [(4, 4, EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CUDA)]
    with pytest.raises(NotImplementedError, match=r"embedding_specs\[0\]\[2\]"):
        SplitTableBatchedEmbeddingBagsCodegen(managed)
    with pytest.raises(NotImplementedError, match="get_uvm_cache_stats"):
        SplitTableBatchedEmbeddingBagsCodegen(spec).get_uvm_cache_stats()


def test_without_torchrec_the_error_says_what_is_missing() -> None:
    done = python(
        "import sys; sys.modules['torchrec'] = None\n"
        "import tbe, tbe.compat.torchrec\n"
        "try: tbe.compat.torchrec.install()\n"
        "except ImportError as error: print(error)"
    )
    assert "needs torchrec and fbgemm_gpu" in done.stdout, done.stderr


def test_importing_tbe_does_not_import_torchrec() -> None:
    done = python("import sys, tbe; print([m for m in sys.modules if m.startswith(('torchrec', 'fbgemm_gpu'))])")
    assert done.stdout.strip() == "[]", done.stderr


def example(*options: str) -> list[float]:
    """The losses that examples/torchrec_dlrm.py prints on two processes."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(ROOT / "examples" / "torchrec_dlrm.py"), *options],
        env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(line.split()[-1]) for line in done.stdout.splitlines() if " loss " in line]


@needs_torchrec
def test_the_example_and_its_checkpoint(tmp_path: Path) -> None:
    """Four steps over ours, then four over FBGEMM_GPU's from the checkpoint, are eight over FBGEMM_GPU's."""
    ours = example("--kernel", "tbe", "--steps", "4", "--save", str(tmp_path))
    resumed = example("--kernel", "fbgemm", "--steps", "4", "--resume", str(tmp_path))
    straight = example("--kernel", "fbgemm", "--steps", "8")
    assert len(straight) == 8 and len({*straight}) > 4
    assert ours + resumed == pytest.approx(straight, abs=1e-5)


def test_the_figures_are_those_of_the_page() -> None:
    from tbe.compat.torchrec.figures import H200

    page = (ROOT / "docs" / "measured_facts.md").read_text(encoding="utf-8")
    for name, figures in H200.items():
        cells = re.search(rf"^\| {name} \|(.+)$", page, re.MULTILINE)
        assert cells is not None
        first = [float(cell.split("/")[0].replace(",", "")) for cell in cells[1].split("|")[:3]]
        assert (figures.forward, figures.together) == (first[0], first[2])


@needs_torchrec
def test_one_gpu_is_predicted_as_measured() -> None:
    """The planner's model, fed with a workload's own figures, gives that workload's times back."""
    from tbe.compat.torchrec.figures import H200
    from tbe.compat.torchrec.simulate import predict

    figures = H200["mlperf_dlrm2"]
    found = predict(1, figures, 8192)
    assert found.sharding == {"table_wise": 26}
    assert found.forward == pytest.approx(figures.forward * 1e-3, rel=1e-6)
    assert found.update == pytest.approx((figures.together - figures.forward) * 1e-3, rel=1e-6)
    with pytest.raises(ValueError, match="gpus=12"):
        predict(12, figures, 8192)
    with pytest.raises(ValueError, match="batch=100"):
        predict(8, figures, 100)


@needs_torchrec
def test_eight_gpus_share_the_work() -> None:
    """Every lookup is on some GPU: the mean GPU has an eighth of what one GPU would have."""
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.estimator.estimator import EmbeddingPerfEstimatorFactory

    from tbe.compat.torchrec import planning
    from tbe.compat.torchrec.figures import H200
    from tbe.compat.torchrec.simulate import predict

    one, eight = (predict(n, H200["uniform_10m"], 65536) for n in (1, 8))
    assert sum(eight.sharding.values()) == 26
    assert eight.mean <= eight.slowest < one.slowest
    assert eight.forward + eight.update >= (one.forward + one.update) / 8 * 0.9
    registered = EmbeddingPerfEstimatorFactory.create(planning.NAME, topology=Topology(8, "cuda"))
    assert registered.config.name == "tbe_h200:uniform_10m"
