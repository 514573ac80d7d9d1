"""Measured times of this library's kernels as bytes a second, for TorchRec's planner. No torchrec needed.

The times are those of ``docs/measured_facts.md``: one NVIDIA H200, torch 2.11.0, Triton 3.6.0, 2026-12-01, fp16
tables, fp32 output, exact row-wise Adagrad.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tbe.bench.workloads import Workload, select

WEIGHT, GRADIENT, ID = 2, 4, 8
"""Bytes of an element of the tables and of the output's gradient, and of an id, in the runs measured."""


@dataclass(frozen=True)
class Figures:
    """One workload's row of the table: microseconds on one device."""

    workload: str
    forward: float
    """An inference forward."""
    together: float
    """A training forward and its backward, sort included."""

    @cached_property
    def _workload(self) -> Workload:
        (found,) = select(self.workload)
        return found

    @property
    def _elements(self) -> int:
        """Of the rows that a step's lookups read, every lookup counted."""
        w = self._workload
        return sum(length * dim for length, dim in zip(w.lengths, w.dims, strict=True)) * w.batch

    @property
    def forward_speed(self) -> float:
        """Bytes a second: ids and rows read, every lookup counted, and outputs written."""
        w = self._workload
        size = self._elements * WEIGHT + sum(w.lengths) * w.batch * ID + sum(w.dims) * w.batch * GRADIENT
        return size / (self.forward * 1e-6)

    @property
    def update_speed(self) -> float:
        """Bytes a second of what training adds to the forward: a gradient row read, and a row of the table read
        and written, for every lookup."""
        return self._elements * (GRADIENT + 2 * WEIGHT) / ((self.together - self.forward) * 1e-6)


H200 = {f.workload: f for f in (Figures("uniform_10m", 184, 920), Figures("mlperf_dlrm2", 96.2, 438))}
"""``uniform_10m`` meets hardly a row twice; ``mlperf_dlrm2`` has the skew and the small tables of DLRM-v2."""
