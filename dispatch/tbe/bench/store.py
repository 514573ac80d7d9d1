"""The results database: SQLite through the standard library. ``schema`` has its tables, ``queries`` reads
it."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from types import TracebackType

from tbe.bench.errors import StoreError
from tbe.bench.gate import Verdict
from tbe.bench.measure import Figure
from tbe.bench.profile import Profile
from tbe.bench.schema import TABLES, VERSION, VIEWS
from tbe.bench.workloads import Workload

OK, WRONG, UNAVAILABLE, UNSUPPORTED = "ok", "wrong", "unavailable", "unsupported"
FAILED, NOT_RUN = "failed", "not run"


@dataclass(frozen=True)
class Outcome:
    """What became of one implementation on one workload. ``reason`` is empty only when ``status`` is ``ok``,
    and ``figures`` only then not empty; ``detail`` is what the operator chose to run with."""

    status: str
    reason: str = ""
    detail: str = ""
    verdict: Verdict | None = None
    figures: tuple[Figure, ...] = ()


class _GeometricMean:
    """SQL aggregate ``geomean(x)`` of positive numbers; SQLite may be built without ln and exp."""

    def __init__(self) -> None:
        self._logs: list[float] = []

    def step(self, value: float | None) -> None:
        if value is not None:
            self._logs.append(math.log(value))

    def finalize(self) -> float | None:
        return math.exp(math.fsum(self._logs) / len(self._logs)) if self._logs else None


class Store:
    """A database file, open until the ``with`` block ends. Every ``add_`` call is one transaction.

    ``create`` makes the file when missing. Raises ``StoreError`` when it is missing otherwise, is no SQLite
    file, or has another schema version.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if not create and not path.is_file():
            raise StoreError(f"no results database at {path}")
        self.path = path
        try:
            self._connection = sqlite3.connect(path)
        except sqlite3.OperationalError as error:
            raise StoreError(f"{path} cannot be opened: {error}") from None
        try:
            self._prepare()
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise StoreError(f"{path} is not a results database: {error}") from None
        except StoreError:
            self._connection.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def _prepare(self) -> None:
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("PRAGMA foreign_keys = ON")
        self._connection.create_aggregate("geomean", 1, _GeometricMean)  # type: ignore[arg-type]
        names = {row["name"] for row in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not names:
            insert = f"INSERT INTO schema_version VALUES ({VERSION});"
            self._connection.executescript(f"BEGIN;{TABLES}{VIEWS}{insert}COMMIT;")
            return
        if "schema_version" not in names:
            raise StoreError(f"{self.path} is a database of something else: it has no schema_version")
        found = [row["version"] for row in self.rows("SELECT version FROM schema_version")]
        if found != [VERSION]:
            raise StoreError(
                f"{self.path} has schema version {', '.join(map(str, found)) or 'none'}, and this program "
                f"reads version {VERSION} only; write new results to another file"
            )

    def rows(self, query: str, values: Iterable[object] | Mapping[str, object] = ()) -> list[sqlite3.Row]:
        """Rows of one query with its values, by name when a mapping; also for a person's own queries."""
        given = dict(values) if isinstance(values, Mapping) else tuple(values)
        return self._connection.execute(query, given).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._connection:
            yield

    def _insert(self, table: str, values: Mapping[str, object]) -> int:
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        query = f"INSERT INTO {table} ({names}) VALUES ({marks})"
        return int(self._connection.execute(query, tuple(values.values())).lastrowid or 0)

    def _ensure(self, table: str, values: Mapping[str, object]) -> int:
        """Id of the row with these values, added if missing."""
        test = " AND ".join(f"{name} = ?" for name in values)
        found = self.rows(f"SELECT id FROM {table} WHERE {test}", values.values())
        return int(found[0]["id"]) if found else self._insert(table, values)

    def add_run(
        self,
        machine: Mapping[str, object],
        software: Mapping[str, object],
        *,
        repeats: int,
        scale: float,
        seed: int,
        copy_bytes_per_second: float,
    ) -> int:
        """Begin a run and return its id. ``machine`` and ``software`` have their tables' columns."""
        with self._transaction():
            values = {
                "machine_id": self._ensure("machine", machine),
                "software_id": self._ensure("software", software),
                "started": _now(),
                "repeats": repeats,
                "scale": scale,
                "seed": seed,
                "copy_bytes_per_second": copy_bytes_per_second,
            }
            return self._insert("run", values)

    def finish_run(self, run: int) -> None:
        """Mark a run as complete; one without it was cut short."""
        with self._transaction():
            self._connection.execute("UPDATE run SET finished = ? WHERE id = ?", (_now(), run))

    def add_workload(self, workload: Workload) -> int:
        """Id of the workload with exactly these parameters."""
        values = {
            "name": workload.name,
            "parameters": json.dumps(workload.parameters(), sort_keys=True),
            "summary": workload.summary(),
        }
        with self._transaction():
            return self._ensure("workload", values)

    def add_implementation(self, name: str, version: str, ours: bool) -> int:
        """Id of an implementation."""
        with self._transaction():
            return self._ensure("implementation", {"name": name, "version": version, "ours": int(ours)})

    def add_batch(self, run: int, workload: int, position: int, facts: Profile, tags: Iterable[str] = ()) -> None:
        """What one batch of a workload holds: counts, floors and run lengths; ``tags`` are the groups that the
        workload counts in."""
        with self._transaction():
            values = {
                "run_id": run,
                "workload_id": workload,
                "position": position,
                "lookups": sum(facts.lookups),
                "touched_rows": sum(facts.touched),
                "longest_run": facts.longest,
                "forward_floor_bytes": facts.forward_bytes,
                "backward_floor_bytes": facts.backward_bytes,
                "output_bytes": facts.output_bytes,
            }
            self._insert("batch", values)
            for tag in tags:
                self._insert("batch_tag", {"run_id": run, "workload_id": workload, "tag": tag})
            for part in facts.bins:
                lengths = {"low": part.low, "high": part.high, "runs": part.runs, "lookups": part.lookups}
                self._insert("run_length", {"run_id": run, "workload_id": workload, **lengths})

    def add_result(self, run: int, workload: int, implementation: int, position: int, outcome: Outcome) -> None:
        """One outcome with all its figures. ``position`` is its turn on the workload, from 0. Raises
        ``sqlite3.IntegrityError`` for figures of a result that is not ``ok``."""
        verdict = outcome.verdict
        values = {
            "run_id": run,
            "workload_id": workload,
            "implementation_id": implementation,
            "position": position,
            "status": outcome.status,
            "reason": outcome.reason,
            "detail": outcome.detail,
            "forward_error": verdict and verdict.forward_error,
            "weight_error": verdict and verdict.weight_error,
            "state_error": verdict and verdict.state_error,
        }
        with self._transaction():
            result = self._insert("result", values)
            for figure in outcome.figures:
                self._add_figure(result, figure)

    def _add_figure(self, result: int, figure: Figure) -> None:
        samples = figure.samples
        values = {
            "result_id": result,
            "metric": figure.metric,
            "unit": figure.unit,
            "median": median(samples) if samples else None,
            "minimum": min(samples) if samples else None,
            "maximum": max(samples) if samples else None,
            "samples": len(samples),
            "note": figure.note,
        }
        self._insert("measurement", values)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
