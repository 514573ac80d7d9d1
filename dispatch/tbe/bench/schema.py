"""The tables of a results database. A change to them is a new ``VERSION``; other versions are refused."""

from __future__ import annotations

VERSION = 2

# A figure belongs to a result, a result to one run, one workload and one implementation, and a run to one
# machine and one set of software. Triggers keep figures off results that did not pass the gate, so that no
# query can meet one. Times are seconds, memory bytes.
TABLES = """
CREATE TABLE schema_version (version INTEGER NOT NULL);

CREATE TABLE machine (
    id INTEGER PRIMARY KEY,
    device TEXT NOT NULL,
    device_type TEXT NOT NULL,
    architecture TEXT NOT NULL,
    processors INTEGER NOT NULL,
    memory_bytes INTEGER NOT NULL,
    host TEXT NOT NULL,
    UNIQUE (device, device_type, architecture, processors, memory_bytes, host)
);

CREATE TABLE software (
    id INTEGER PRIMARY KEY,
    python TEXT NOT NULL,
    torch TEXT NOT NULL,
    triton TEXT NOT NULL,
    cuda TEXT NOT NULL,
    UNIQUE (python, torch, triton, cuda)
);

CREATE TABLE workload (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    parameters TEXT NOT NULL,
    summary TEXT NOT NULL,
    UNIQUE (name, parameters)
);

CREATE TABLE implementation (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    version TEXT NOT NULL,
    ours INTEGER NOT NULL CHECK (ours IN (0, 1)),
    UNIQUE (name, version)
);

CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    machine_id INTEGER NOT NULL REFERENCES machine (id),
    software_id INTEGER NOT NULL REFERENCES software (id),
    started TEXT NOT NULL,
    finished TEXT,
    repeats INTEGER NOT NULL,
    scale REAL NOT NULL,
    seed INTEGER NOT NULL,
    copy_bytes_per_second REAL NOT NULL CHECK (copy_bytes_per_second > 0)
);

CREATE TABLE batch (
    run_id INTEGER NOT NULL REFERENCES run (id),
    workload_id INTEGER NOT NULL REFERENCES workload (id),
    position INTEGER NOT NULL,
    lookups INTEGER NOT NULL,
    touched_rows INTEGER NOT NULL,
    longest_run INTEGER NOT NULL,
    forward_floor_bytes INTEGER NOT NULL,
    backward_floor_bytes INTEGER NOT NULL,
    output_bytes INTEGER NOT NULL,
    PRIMARY KEY (run_id, workload_id)
);

CREATE TABLE batch_tag (
    run_id INTEGER NOT NULL,
    workload_id INTEGER NOT NULL,
    tag TEXT NOT NULL,
    PRIMARY KEY (run_id, workload_id, tag),
    FOREIGN KEY (run_id, workload_id) REFERENCES batch (run_id, workload_id)
);

CREATE TABLE run_length (
    run_id INTEGER NOT NULL,
    workload_id INTEGER NOT NULL,
    low INTEGER NOT NULL,
    high INTEGER NOT NULL CHECK (high >= low),
    runs INTEGER NOT NULL,
    lookups INTEGER NOT NULL,
    PRIMARY KEY (run_id, workload_id, low),
    FOREIGN KEY (run_id, workload_id) REFERENCES batch (run_id, workload_id)
);

CREATE TABLE result (
    id INTEGER PRIMARY KEY,
    run_id INTEGER NOT NULL REFERENCES run (id),
    workload_id INTEGER NOT NULL REFERENCES workload (id),
    implementation_id INTEGER NOT NULL REFERENCES implementation (id),
    position INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('ok', 'wrong', 'unavailable', 'unsupported', 'failed', 'not run')),
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    forward_error REAL,
    weight_error REAL,
    state_error REAL,
    UNIQUE (run_id, workload_id, implementation_id),
    CHECK (status = 'ok' OR reason <> '')
);

CREATE TABLE measurement (
    result_id INTEGER NOT NULL REFERENCES result (id),
    metric TEXT NOT NULL,
    unit TEXT NOT NULL CHECK (unit IN ('s', 'B')),
    median REAL,
    minimum REAL,
    maximum REAL,
    samples INTEGER NOT NULL,
    note TEXT NOT NULL,
    PRIMARY KEY (result_id, metric),
    CHECK (median IS NOT NULL OR note <> '')
);

CREATE TRIGGER figures_only_of_right_results BEFORE INSERT ON measurement
WHEN (SELECT status FROM result WHERE id = NEW.result_id) IS NOT 'ok'
BEGIN SELECT RAISE(ABORT, 'a result that did not pass the gate has no figures'); END;

CREATE TRIGGER right_results_stay_right BEFORE UPDATE OF status ON result
WHEN NEW.status <> 'ok' AND EXISTS (SELECT 1 FROM measurement WHERE result_id = NEW.id)
BEGIN SELECT RAISE(ABORT, 'delete the figures of a result before voiding it'); END;
"""

# Ours against every peer, within one run only: the same machine, software and inputs. Of a ratio, more is
# better.
VIEWS = """
CREATE VIEW figure AS
SELECT result.run_id, result.workload_id, result.implementation_id, batch.position, workload.name AS workload,
       implementation.name AS implementation, implementation.ours, measurement.metric, measurement.unit,
       measurement.median, measurement.minimum, measurement.maximum, measurement.samples, measurement.note
FROM measurement
JOIN result ON result.id = measurement.result_id AND result.status = 'ok'
JOIN batch ON batch.run_id = result.run_id AND batch.workload_id = result.workload_id
JOIN workload ON workload.id = result.workload_id
JOIN implementation ON implementation.id = result.implementation_id;

CREATE VIEW comparison AS
SELECT mine.run_id, mine.workload_id, mine.position, mine.workload, mine.metric, mine.implementation AS ours,
       peer.implementation AS peer, mine.median AS our_value, peer.median AS peer_value,
       peer.median / mine.median AS speedup
FROM figure AS mine
JOIN figure AS peer
  ON peer.run_id = mine.run_id AND peer.workload_id = mine.workload_id AND peer.metric = mine.metric
WHERE mine.ours = 1 AND peer.ours = 0 AND mine.median > 0 AND peer.median > 0;

CREATE VIEW against_floor AS
SELECT figure.run_id, figure.workload_id, figure.implementation_id, figure.position, figure.workload,
       figure.implementation, figure.ours, figure.metric, floor_bytes, figure.median AS seconds,
       floor_bytes / run.copy_bytes_per_second AS floor_seconds,
       floor_bytes / run.copy_bytes_per_second / figure.median AS ratio
FROM figure
JOIN (
    SELECT run_id, workload_id, 'forward' AS metric, forward_floor_bytes AS floor_bytes FROM batch
    UNION ALL
    SELECT run_id, workload_id, 'backward', backward_floor_bytes FROM batch
) AS floors
  ON floors.run_id = figure.run_id AND floors.workload_id = figure.workload_id
 AND floors.metric = figure.metric
JOIN run ON run.id = figure.run_id
WHERE figure.median > 0 AND floor_bytes > 0;

CREATE VIEW beyond_output AS
SELECT figure.run_id, figure.workload_id, figure.implementation_id, figure.position, figure.workload,
       figure.implementation, figure.ours, figure.median - batch.output_bytes AS bytes,
       (figure.median - batch.output_bytes) / batch.lookups AS bytes_a_lookup
FROM figure JOIN batch ON batch.run_id = figure.run_id AND batch.workload_id = figure.workload_id
WHERE figure.metric = 'peak_memory' AND figure.median IS NOT NULL AND batch.lookups > 0;
"""
