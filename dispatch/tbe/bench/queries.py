"""Everything a report shows, as SQL over one run. Reports format these rows and compute nothing
themselves."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from tbe.bench.errors import StoreError
from tbe.bench.measure import (
    BACKWARD,
    FIRST_COLD,
    FIRST_WARM,
    FORWARD,
    GRAPH,
    STEP,
    TOGETHER,
)
from tbe.bench.store import Store
from tbe.bench.workloads import TAGS

Rows = Sequence[sqlite3.Row]

COMPARED = (FORWARD, BACKWARD, TOGETHER, STEP)
_COMPARED = ", ".join(f"'{metric}'" for metric in COMPARED)


def _ranked(column: str, values: Sequence[str]) -> str:
    """An ORDER BY term: ``values`` in their order, then the rest."""
    cases = " ".join(f"WHEN '{value}' THEN {number}" for number, value in enumerate(values))
    return f"CASE {column} {cases} ELSE {len(values)} END"


_ORDER = _ranked("metric", COMPARED)
_TAG_ORDER = _ranked("tag", TAGS)


class RunView:
    """One run of a database: the newest, or the one numbered ``run``. Raises ``StoreError`` when there is
    none.

    Every method is one query, limited to this run. Times are seconds; ``speedup`` is the peer's time over
    ours.
    """

    def __init__(self, store: Store, run: int | None = None) -> None:
        self._store = store
        found = store.rows("SELECT id FROM run WHERE ? IS NULL OR id = ? ORDER BY id DESC LIMIT 1", (run, run))
        if not found:
            listed = ", ".join(str(row["id"]) for row in store.rows("SELECT id FROM run ORDER BY id"))
            which = "no run" if run is None else f"no run {run}"
            raise StoreError(f"{store.path} has {which}; runs: {listed or 'none'}")
        self.id = int(found[0]["id"])

    def _rows(self, query: str, *values: object) -> Rows:
        return self._store.rows(query, (self.id, *values))

    def named(self, query: str, values: Mapping[str, object]) -> Rows:
        """Rows of a query with named values, of which ``:run`` is this run."""
        return self._store.rows(query, dict(values, run=self.id))

    def header(self) -> sqlite3.Row:
        """Machine, software and settings of the run; ``complete`` is 0 when it was cut short."""
        query = """
            SELECT run.id, started, finished, finished IS NOT NULL AS complete, repeats, scale, seed,
                   copy_bytes_per_second / 1e12 AS copy_terabytes_per_second, device, architecture,
                   processors, memory_bytes / 1073741824.0 AS memory_gib, host, python, torch, triton, cuda
            FROM run JOIN machine ON machine.id = machine_id JOIN software ON software.id = software_id
            WHERE run.id = ?"""
        return self._rows(query)[0]

    def implementations(self) -> Rows:
        """Name, version and ``ours`` of what took part, ours first."""
        query = """
            SELECT DISTINCT name, version, ours FROM result
            JOIN implementation ON implementation.id = implementation_id
            WHERE run_id = ? ORDER BY ours DESC, implementation.id"""
        return self._rows(query)

    def workloads(self) -> Rows:
        """Facts of each workload's batch."""
        query = """
            SELECT name AS workload, summary, lookups, touched_rows, longest_run, forward_floor_bytes,
                   backward_floor_bytes
            FROM batch JOIN workload ON workload.id = workload_id WHERE run_id = ? ORDER BY position"""
        return self._rows(query)

    def figures(self) -> Rows:
        """Every metric of every result that passed the gate."""
        query = f"""
            SELECT workload, implementation, ours, metric, unit, median, minimum, maximum, samples, note
            FROM figure WHERE run_id = ? ORDER BY position, ours DESC, implementation_id, {_ORDER}"""
        return self._rows(query)

    def times(self) -> Rows:
        """One row a workload and implementation: forward, backward, together, step, graph, first_step_cold,
        first_step_warm, and the peak memory beyond the output in bytes a lookup."""
        names = (FORWARD, BACKWARD, TOGETHER, STEP, GRAPH, FIRST_COLD, FIRST_WARM)
        picks = ", ".join(f"MAX(CASE metric WHEN '{name}' THEN figure.median END) AS {name}" for name in names)
        query = f"""
            SELECT figure.workload, figure.implementation, figure.ours, {picks}, bytes_a_lookup
            FROM figure LEFT JOIN beyond_output USING (run_id, workload_id, implementation_id)
            WHERE run_id = ? GROUP BY workload_id, implementation_id
            ORDER BY figure.position, figure.ours DESC, implementation_id"""
        return self._rows(query)

    def comparisons(self) -> Rows:
        """Ours against each peer, a row a workload and metric of ``COMPARED``."""
        query = f"""
            SELECT workload, ours, peer, metric, our_value, peer_value, speedup FROM comparison
            WHERE run_id = ? AND metric IN ({_COMPARED})
            ORDER BY ours, peer, position, {_ORDER}"""
        return self._rows(query)

    def summary(self) -> Rows:
        """Geometric mean and worst of the speed-ups, a row for each of ours, peer, group of workloads (``tag``)
        and metric. ``worst_workload`` is a bare column: SQLite takes it from the row of the MIN."""
        query = f"""
            SELECT ours, peer, tag, metric, COUNT(*) AS workloads, geomean(speedup) AS geomean,
                   MIN(speedup) AS worst, workload AS worst_workload
            FROM comparison JOIN batch_tag USING (run_id, workload_id)
            WHERE run_id = ? AND metric IN ({_COMPARED})
            GROUP BY ours, peer, tag, metric ORDER BY ours, peer, {_TAG_ORDER}, {_ORDER}"""
        return self._rows(query)

    def floors(self) -> Rows:
        """Forward and backward against the gather floor; ``ratio`` is floor over time."""
        query = f"""
            SELECT workload, implementation, ours, metric, floor_bytes, seconds, floor_seconds, ratio
            FROM against_floor WHERE run_id = ? ORDER BY position, ours DESC, implementation_id, {_ORDER}"""
        return self._rows(query)

    def run_lengths(self) -> Rows:
        """The run-length histogram: bins of each workload with the share of its lookups that they hold. A
        variant looks up what its base does, and is left out where the base is there."""
        query = """
            SELECT name AS workload, low, high, runs, run_length.lookups,
                   CAST(run_length.lookups AS REAL) / batch.lookups AS share
            FROM run_length JOIN batch USING (run_id, workload_id) JOIN workload ON workload.id = workload_id
            WHERE run_id = ? AND batch.lookups > 0 AND NOT EXISTS (
                SELECT 1 FROM batch AS other JOIN workload AS base ON base.id = other.workload_id
                WHERE other.run_id = batch.run_id
                  AND substr(workload.name, 1, length(base.name) + 1) = base.name || '.')
            ORDER BY position, low"""
        return self._rows(query)

    def voided(self) -> Rows:
        """Results without figures: status and reason, and how far off a wrong one was."""
        query = """
            SELECT workload.name AS workload, implementation.name AS implementation, status, reason,
                   forward_error, weight_error, state_error
            FROM result JOIN workload ON workload.id = workload_id
            JOIN implementation ON implementation.id = implementation_id
            WHERE run_id = ? AND status <> 'ok' ORDER BY result.id"""
        return self._rows(query)

    def reasons(self) -> Rows:
        """The same, one row a reason; ``workloads`` names them all, in order."""
        query = """
            SELECT implementation, status, reason, GROUP_CONCAT(workload, ', ') AS workloads FROM (
                SELECT result.id, workload.name AS workload, implementation.name AS implementation, status,
                       reason, implementation_id
                FROM result JOIN workload ON workload.id = workload_id
                JOIN implementation ON implementation.id = implementation_id
                WHERE run_id = ? AND status <> 'ok' ORDER BY result.id
            ) GROUP BY implementation_id, status, reason ORDER BY MIN(id)"""
        return self._rows(query)

    def notes(self) -> Rows:
        """Metrics that could not be had, or with a qualification."""
        query = """
            SELECT workload, implementation, metric, note FROM figure
            WHERE run_id = ? AND note <> '' ORDER BY position, implementation_id, metric"""
        return self._rows(query)

    def gate(self) -> Rows:
        """Errors of the results that passed, worst first by weight error."""
        query = """
            SELECT workload.name AS workload, implementation.name AS implementation, detail,
                   forward_error, weight_error, state_error
            FROM result JOIN workload ON workload.id = workload_id
            JOIN implementation ON implementation.id = implementation_id
            WHERE run_id = ? AND status = 'ok' ORDER BY result.id"""
        return self._rows(query)
