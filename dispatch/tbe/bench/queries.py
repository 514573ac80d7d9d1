"""Everything a report shows, as SQL over one run. Reports format these rows and compute nothing
themselves."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from tbe.bench.errors import StoreError
from tbe.bench.store import Store

Rows = Sequence[sqlite3.Row]

COMPARED = ("forward", "backward", "step")
_ORDER = "CASE metric WHEN 'forward' THEN 0 WHEN 'backward' THEN 1 WHEN 'step' THEN 2 ELSE 3 END"


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
        """One row a workload and implementation: forward, backward, step, graph, first step, peak memory."""
        query = """
            SELECT workload, implementation, ours,
                   MAX(CASE metric WHEN 'forward' THEN median END) AS forward,
                   MAX(CASE metric WHEN 'backward' THEN median END) AS backward,
                   MAX(CASE metric WHEN 'step' THEN median END) AS step,
                   MAX(CASE metric WHEN 'graph' THEN median END) AS graph,
                   MAX(CASE metric WHEN 'first_step_cold' THEN median END) AS first_step_cold,
                   MAX(CASE metric WHEN 'first_step_warm' THEN median END) AS first_step_warm,
                   MAX(CASE metric WHEN 'peak_memory' THEN median END) AS peak_memory
            FROM figure WHERE run_id = ?
            GROUP BY workload_id, implementation_id ORDER BY position, ours DESC, implementation_id"""
        return self._rows(query)

    def comparisons(self) -> Rows:
        """Ours against each peer, a row a workload and metric (forward, backward, step)."""
        query = f"""
            SELECT workload, ours, peer, metric, our_value, peer_value, speedup FROM comparison
            WHERE run_id = ? AND metric IN ('forward', 'backward', 'step')
            ORDER BY ours, peer, position, {_ORDER}"""
        return self._rows(query)

    def summary(self) -> Rows:
        """Geometric mean and worst of the speed-ups, a row for each of ours, peer and metric."""
        query = f"""
            SELECT ours, peer, metric, COUNT(*) AS workloads, geomean(speedup) AS geomean,
                   MIN(speedup) AS worst,
                   (SELECT inner_.workload FROM comparison AS inner_
                    WHERE inner_.run_id = outer_.run_id AND inner_.ours = outer_.ours
                      AND inner_.peer = outer_.peer AND inner_.metric = outer_.metric
                    ORDER BY inner_.speedup, inner_.position LIMIT 1) AS worst_workload
            FROM comparison AS outer_ WHERE run_id = ? AND metric IN ('forward', 'backward', 'step')
            GROUP BY ours, peer, metric ORDER BY ours, peer, {_ORDER}"""
        return self._rows(query)

    def floors(self) -> Rows:
        """Forward and backward against the gather floor."""
        query = f"""
            SELECT workload, implementation, ours, metric, seconds, floor_seconds, ratio
            FROM against_floor WHERE run_id = ? ORDER BY position, {_ORDER}, ours DESC, implementation"""
        return self._rows(query)

    def run_lengths(self) -> Rows:
        """The run-length histogram: bins of each workload with the share of its lookups that they hold."""
        query = """
            SELECT name AS workload, low, high, runs, run_length.lookups,
                   CAST(run_length.lookups AS REAL) / batch.lookups AS share
            FROM run_length JOIN batch USING (run_id, workload_id) JOIN workload ON workload.id = workload_id
            WHERE run_id = ? AND batch.lookups > 0 ORDER BY position, low"""
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
