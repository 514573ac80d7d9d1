"""The named workloads: one tagged list that the runner, the tests and the documentation share.

``base`` workloads span what moves this operator's time: launch-bound (small_batch), memory-bound over
distinct rows (uniform_10m, distinct_10m), middling runs (band_10k), skew (zipf_1m, blog_batch), tables
that fit in a cache (hot_100), mixed and wide rows, and the tables and bag sizes of MLPerf's DLRM-v2.
``fbgemm_default`` has the shape of FBGEMM's own benchmark, at this list's dtypes. ``published`` workloads
are others' benchmarks exactly as they publish them. The other tags vary one thing of a base workload.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tbe.bench.errors import SelectionError
from tbe_core.optimizers import Adam, Optimizer, PartialRowwiseAdam, RowwiseAdagrad
from tbe_core.types import BoundsCheck, Pooling

UNIFORM, DISTINCT, ZIPF = "uniform", "distinct", "zipf"

ADAGRAD = RowwiseAdagrad(lr=0.01, eps=1e-8)
ADAMS = (Adam(lr=0.01, eps=1e-8), PartialRowwiseAdam(lr=0.01, eps=1e-8))

BASE, WEIGHTED, FP16_OUTPUT = "base", "weighted", "fp16_output"
VARIANT, OPTIMIZER, PUBLISHED = "variant", "optimizer", "published"
TAGS = (BASE, WEIGHTED, FP16_OUTPUT, VARIANT, OPTIMIZER, PUBLISHED)

BOUNDS_WARN = "bounds_warn"  # suffix of the variant that checks every id, as its peers then do too

# MLPerf DLRM-v2 (Criteo 1TB, multi-hot): rows a table, lookups a bag.
_MLPERF_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
_MLPERF_LENGTHS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# The 66 tables of the benchmark command in pull request 4548 of meta-pytorch/torchrec.
_TORCHREC_ROWS = (
    *(13_164_873, 13_164_873, 1_000, 49_537, 13_164_873, 13_164_873, 13_164_873, 13_164_873, 61_791, 524_757),
    *(7_685_380, 51_920, 1_000, 13_164_873, 500_000, 19_327, 72_993, 5_000, 13_164_873, 132_058, 773, 294),
    *(679, 195_677, 13_164_873, 80_855, 16_992_630, 5_000, 189_056, 5_000, 8_000_000, 102, 113, 600_741),
    *(5_000, 29_325, 285_698, 1_005_371, 50_000, 30_726, 607, 308, 591, 621, 727, 648, 390, 449, 678, 708),
    *(726, 581, 137, 100, 100, 728, 328, 724, 429, 570, 192, 5_000, 511_788, 2, 2, 2),
)
_TORCHREC_DIMS = (*[128] * 26, 64, *[128] * 13, *[8] * 21, 128, 128, 4, 4, 4)
_TORCHREC_LENGTHS = (
    *(120, 86, 86, 83, 77, 77, 70, 47, 43, 34, 24, 22, 20, 15, 11, 11, 8, 7, 7, 7, 5, 5, 5, 5, 5, 4, 5, 3, 2),
    *([1] * 11 + [5] * 21 + [1] * 5),
)
_MIXED_DIMS = (4, 8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 64, 32, 20)


@dataclass(frozen=True)
class Workload:
    """One problem to measure; feature t looks up table t.

    ``rows`` and ``dims`` are per table, ``batch`` the bags a feature, ``lengths`` the lookups a bag for
    each feature: exactly that many, or uniform integers in [0, 2L] when ``varying``. ``ids`` is
    ``uniform``, ``distinct`` (no row twice in a batch) or ``zipf`` with exponent ``zipf_exponent`` (above
    1). Ids are all in range, whatever ``bounds_check`` looks for. Raises
    ``ValueError`` when the tuples disagree.
    """

    name: str
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    batch: int
    lengths: tuple[int, ...]
    ids: str = UNIFORM
    zipf_exponent: float = 0.0
    varying: bool = False
    weighted: bool = False
    pooling: Pooling = "sum"
    weights_dtype: torch.dtype = torch.float16
    output_dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    bounds_check: BoundsCheck = "none"
    optimizer: Optimizer = ADAGRAD
    tags: tuple[str, ...] = (BASE,)
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not len(self.rows) == len(self.dims) == len(self.lengths) > 0:
            sizes = f"{len(self.rows)}, {len(self.dims)} and {len(self.lengths)}"
            raise ValueError(f"{self.name}: rows, dims and lengths must have one entry a table, got {sizes}")
        if self.ids not in (UNIFORM, DISTINCT, ZIPF):
            raise ValueError(f"{self.name}: ids must be uniform, distinct or zipf, got {self.ids!r}")
        if self.ids == ZIPF and self.zipf_exponent <= 1.0:
            raise ValueError(f"{self.name}: zipf_exponent must be above 1, got {self.zipf_exponent}")

    @property
    def features(self) -> int:
        """T, the number of features and of tables."""
        return len(self.rows)

    @property
    def columns(self) -> tuple[int, ...]:
        """First output column of each feature, then the total width: T+1 numbers."""
        starts = [0]
        for dim in self.dims:
            starts.append(starts[-1] + dim)
        return tuple(starts)

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables, without optimizer state."""
        return sum(r * d for r, d in zip(self.rows, self.dims, strict=True)) * self.weights_dtype.itemsize

    def scaled(self, factor: float) -> Workload:
        """The same shape with ``factor`` times the bags and rows, at least one of each. Dims and bag
        sizes stay, so run lengths stay about the same. Raises ``ValueError`` unless 0 < factor <= 1."""
        if not 0 < factor <= 1:
            raise ValueError(f"scale must be in (0, 1], got {factor}")
        batch = max(1, round(self.batch * factor))
        rows = tuple(max(1, round(r * factor)) for r in self.rows)
        if self.ids == DISTINCT:
            # Rounding must not leave fewer rows than lookups: the batch would stop being distinct.
            rows = tuple(max(r, batch * length) for r, length in zip(rows, self.lengths, strict=True))
        return replace(self, batch=batch, rows=rows, scale=self.scale * factor)

    def parameters(self) -> dict[str, object]:
        """Everything that decides the inputs and the arithmetic, ready for JSON; the name and tags are
        not."""
        return {
            "rows": list(self.rows),
            "dims": list(self.dims),
            "batch": self.batch,
            "lengths": list(self.lengths),
            "ids": self.ids,
            "zipf_exponent": self.zipf_exponent,
            "varying": self.varying,
            "weighted": self.weighted,
            "pooling": self.pooling,
            "weights_dtype": dtype_name(self.weights_dtype),
            "output_dtype": dtype_name(self.output_dtype),
            "index_dtype": dtype_name(self.index_dtype),
            "bounds_check": self.bounds_check,
            "optimizer": self.optimizer.NAME,
            **dict(zip(self.optimizer.HYPER, self.optimizer.hyper_values(), strict=True)),
        }

    def summary(self) -> str:
        """One line for a person: tables, widths, bags, bag sizes, ids and what is not the default."""
        ids = f"Zipf {self.zipf_exponent}" if self.ids == ZIPF else self.ids
        length = ("~" if self.varying else "") + _span(self.lengths)
        parts = [f"{self.features} x {_span(self.rows)} rows", f"D {_span(self.dims)}", f"B {self.batch}"]
        parts += [f"L {length}", ids, f"{dtype_name(self.weights_dtype)} to {dtype_name(self.output_dtype)}"]
        parts += ["weighted"] if self.weighted else []
        parts += [self.pooling] if self.pooling != "sum" else []
        parts += [dtype_name(self.index_dtype)] if self.index_dtype != torch.int64 else []
        parts += [self.optimizer.NAME] if self.optimizer.NAME != ADAGRAD.NAME else []
        parts += [f"bounds check {self.bounds_check}"] if self.bounds_check != "none" else []
        return ", ".join(parts)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float16`` as ``float16``."""
    return str(dtype).removeprefix("torch.")


def _span(values: tuple[int, ...]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}..{high:,}"


def _even(name: str, tables: int, rows: int, dim: int, batch: int, length: int, zipf: float = 0.0) -> Workload:
    """A workload whose tables are all alike; Zipf ids when ``zipf`` is given, else uniform."""
    ids = ZIPF if zipf else UNIFORM
    rest = (batch, (length,) * tables, ids, zipf)
    return Workload(name, (rows,) * tables, (dim,) * tables, *rest)


def _base() -> list[Workload]:
    mixed = Workload("mixed_dims", (1_000_000,) * 16, _MIXED_DIMS, 8192, (20,) * 16, ZIPF, 1.05)
    mlperf = Workload("mlperf_dlrm2", _MLPERF_ROWS, (128,) * 26, 8192, _MLPERF_LENGTHS, ZIPF, 1.05)
    return [
        _even("fbgemm_default", 32, 100_000, 128, 512, 20),
        _even("small_batch", 8, 1_000_000, 64, 128, 10),
        _even("uniform_10m", 16, 10_000_000, 128, 8192, 20),
        replace(_even("distinct_10m", 8, 10_000_000, 128, 16384, 20), ids=DISTINCT),
        _even("band_10k", 16, 10_000, 128, 16384, 40),
        replace(_even("zipf_1m", 16, 1_000_000, 128, 16384, 30, zipf=1.15), varying=True),
        _even("hot_100", 16, 100, 128, 16384, 40),
        mixed,
        _even("wide_1024", 4, 200_000, 1024, 4096, 20, zipf=1.05),
        mlperf,
        _even("blog_batch", 32, 4_000_000, 128, 131_072, 20, zipf=1.2),
    ]


def _variants(base: Iterable[Workload]) -> list[Workload]:
    """Weighted for every regime of run lengths and for mixed widths; fp16 output wherever every table has the
    same width; other dtypes and mean for two small ones; Adam, whole and row-wise, for three; checked ids for one
    that fills the device."""
    by_name = {workload.name: workload for workload in base}
    weighted = ("fbgemm_default", "uniform_10m", "band_10k", "zipf_1m", "hot_100", "mixed_dims", "mlperf_dlrm2")
    out = [_like(by_name[name], "weighted", WEIGHTED, weighted=True) for name in weighted]
    for shape in by_name.values():
        if len(set(shape.dims)) == 1:
            out.append(_like(shape, "fp16_output", FP16_OUTPUT, output_dtype=torch.float16))
    for name in ("fbgemm_default", "zipf_1m"):
        out += [
            _like(by_name[name], "fp32_tables", VARIANT, weights_dtype=torch.float32),
            _like(by_name[name], "bf16_tables", VARIANT, weights_dtype=torch.bfloat16),
            _like(by_name[name], "int32_indices", VARIANT, index_dtype=torch.int32),
            _like(by_name[name], "mean", VARIANT, pooling="mean"),
        ]
    # fp32: FBGEMM's Adam fails on fp16 tables.
    for name in ("fbgemm_default", "band_10k", "zipf_1m"):
        for adam in ADAMS:
            changes = {"weights_dtype": torch.float32, "optimizer": adam}
            out.append(_like(by_name[name], adam.NAME, OPTIMIZER, **changes))
    out.append(_like(by_name["uniform_10m"], BOUNDS_WARN, VARIANT, bounds_check="warn"))
    return out


def _like(shape: Workload, suffix: str, tag: str, **changes: Any) -> Workload:
    """``shape`` with one thing changed, named after it."""
    return replace(shape, name=f"{shape.name}.{suffix}", tags=(tag,), **changes)


def _published() -> list[Workload]:
    """Others' benchmarks: FBGEMM's with every option left at its default, and the 66 tables of a benchmark
    command that TorchRec published. That command names no dtypes and no learning rate: they are this list's."""
    defaults = RowwiseAdagrad(lr=0.1, eps=0.1)
    fbgemm = _even("fbgemm_published", 32, 100_000, 128, 512, 20)
    torchrec = Workload("torchrec_66", _TORCHREC_ROWS, _TORCHREC_DIMS, 294_912, _TORCHREC_LENGTHS)
    return [
        replace(fbgemm, weights_dtype=torch.float32, optimizer=defaults, tags=(PUBLISHED,)),
        replace(torchrec, tags=(PUBLISHED,)),
    ]


def catalogue() -> tuple[Workload, ...]:
    """Every named workload at full size, base workloads first; names are unique."""
    base = _base()
    return (*base, *_variants(base), *_published())


def select(text: str) -> list[Workload]:
    """``"zipf_1m,weighted"`` to workloads, in catalogue order and each once.

    A name is a workload's, a tag of ``TAGS`` or ``all``. Raises ``SelectionError``
    that lists the valid names.
    """
    known = catalogue()
    names = [part.strip() for part in text.split(",") if part.strip()]
    valid = {"all", *TAGS, *(workload.name for workload in known)}
    unknown = [name for name in names if name not in valid]
    if unknown or not names:
        wrong = f"unknown workload {', '.join(unknown)}" if unknown else "no workload named"
        listed = ", ".join(workload.name for workload in known)
        raise SelectionError(f"{wrong}; valid: all, {', '.join(TAGS)}, {listed}")
    wanted = set(names)
    return [w for w in known if "all" in wanted or w.name in wanted or wanted.intersection(w.tags)]
