"""On a GPU: forward time of quantised tables beside the fp16 tables that they were made of.

Usage: python ci/quantized_speed.py [WORKLOAD ...]; workloads are those of ``tbe bench``. Device microseconds with
launches queued ahead, medians of 7 over three input sets. Before any time, a sample of bags of each lookup is
held against fp64 sums of the values that ``dequantize`` gives.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch

import tbe
from tbe.bench.inputs import Inputs, make_input_sets
from tbe.bench.measure import passes
from tbe.bench.workloads import Workload, select
from tbe_core import tolerances
from tbe_core.quantization import QUANTIZATIONS

DEFAULT = ("uniform_10m", "zipf_1m", "mixed_dims", "fbgemm_default", "mlperf_dlrm2")
BAGS = 97
"""Every this many bags of a feature one is checked."""

Lookup = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def check(serving: tbe.QuantizedTableBatchedEmbeddingBags, workload: Workload, inputs: Inputs) -> None:
    """SystemExit where a sampled bag is beyond the contract's tolerance."""
    out, offsets = serving(inputs.indices, inputs.offsets), inputs.offsets.tolist()
    for t, (column, dim) in enumerate(zip(workload.columns, workload.dims, strict=False)):
        for bag in range(0, workload.batch, BAGS):
            ids = inputs.indices[offsets[t * workload.batch + bag] : offsets[t * workload.batch + bag + 1]]
            rows = serving.dequantize(t, ids).double()
            error = (out[bag, column : column + dim].double() - rows.sum(0)).abs()
            # Of an element scale * code and |bias| together are at most three times the row's largest.
            allowed = 3 * tolerances.FORWARD_FP32 * rows.abs().amax(1).sum()
            if bool((error > allowed).any()):
                raise SystemExit(f"{workload.name} {serving.spec.quantization}: feature {t}, bag {bag} is wrong")


def microseconds(lookup: Lookup, sets: list[Inputs], device: torch.device) -> float:
    """Median device time of a forward."""

    def timed(number: int, _: None) -> torch.Tensor:
        inputs = sets[number % len(sets)]
        return lookup(inputs.indices, inputs.offsets)

    with torch.no_grad():
        for number in range(len(sets)):
            timed(number, None)
        return statistics.median(passes(lambda number: None, timed, device, 7)[0]) * 1e6


def main() -> None:
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    for workload in select(",".join(sys.argv[1:] or DEFAULT)):
        shapes = enumerate(zip(workload.rows, workload.dims, strict=True))
        emb = tbe.TableBatchedEmbeddingBags(
            [tbe.Table(f"t{t}", rows, dim) for t, (rows, dim) in shapes],
            optimizer=tbe.NoOptimizer(),
            weights_dtype=torch.float16,
            bounds_check="none",
            device=device,
        )
        sets = make_input_sets(workload, device, 0)
        line = [f"fp16 {microseconds(emb, sets, device):.0f}"]
        for quantization in QUANTIZATIONS:
            serving = tbe.quantize(emb, quantization)
            check(serving, workload, sets[0])
            line.append(f"{quantization} {microseconds(serving, sets, device):.0f}")
            del serving
        print(f"{workload.name}: {', '.join(line)}", flush=True)
        del emb


if __name__ == "__main__":
    main()
