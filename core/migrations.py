"""The store's schema, as an ordered list of steps; `PRAGMA user_version` says how many were taken."""

from __future__ import annotations

import sqlite3

MIGRATIONS = [
    """
    CREATE TABLE runs (
        run_id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN
            ('queued','running','paused','stopped','finished','failed','interrupted')),
        config TEXT NOT NULL,
        device_kind TEXT,
        pid INTEGER,
        pid_started REAL,
        created REAL NOT NULL,
        started REAL,
        ended REAL,
        heartbeat REAL,
        phase TEXT NOT NULL DEFAULT '{}',
        note TEXT NOT NULL DEFAULT '',
        tags TEXT NOT NULL DEFAULT '[]',
        request_token TEXT UNIQUE
    ) STRICT;
    CREATE TABLE events (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        run_id TEXT NOT NULL REFERENCES runs(run_id) ON DELETE CASCADE,
        kind TEXT NOT NULL,
        at REAL NOT NULL,
        payload TEXT NOT NULL
    ) STRICT;
    CREATE INDEX events_of_run ON events (run_id, id);
    CREATE INDEX events_of_kind ON events (run_id, kind, id);
    CREATE TABLE requests (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        run_id TEXT NOT NULL REFERENCES runs(run_id) ON DELETE CASCADE,
        kind TEXT NOT NULL,
        payload TEXT NOT NULL,
        at REAL NOT NULL,
        taken REAL
    ) STRICT;
    CREATE TABLE device_locks (
        device_kind TEXT PRIMARY KEY,
        run_id TEXT NOT NULL REFERENCES runs(run_id) ON DELETE CASCADE,
        pid INTEGER NOT NULL,
        pid_started REAL NOT NULL
    ) STRICT;
    """,
    """
    ALTER TABLE runs ADD COLUMN purpose TEXT NOT NULL DEFAULT 'train'
        CHECK (purpose IN ('train','warm-up','probe'));
    CREATE TABLE groups (
        group_id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        created REAL NOT NULL,
        note TEXT NOT NULL,
        plan TEXT NOT NULL
    ) STRICT;
    CREATE TABLE group_runs (
        group_id TEXT NOT NULL REFERENCES groups(group_id) ON DELETE CASCADE,
        run_id TEXT NOT NULL REFERENCES runs(run_id) ON DELETE CASCADE,
        label TEXT NOT NULL,
        start TEXT NOT NULL,
        repeat INTEGER NOT NULL,
        PRIMARY KEY (group_id, run_id)
    ) STRICT;
    CREATE INDEX groups_of_run ON group_runs (run_id);
    """,
    """
    ALTER TABLE runs ADD COLUMN place REAL NOT NULL DEFAULT 0;
    ALTER TABLE runs ADD COLUMN script TEXT NOT NULL DEFAULT '[]';
    ALTER TABLE runs ADD COLUMN forked_from TEXT NOT NULL DEFAULT '';
    ALTER TABLE runs ADD COLUMN work TEXT NOT NULL DEFAULT '';
    CREATE TABLE step_blocks (
        run_id TEXT NOT NULL REFERENCES runs(run_id) ON DELETE CASCADE,
        first_event INTEGER NOT NULL,
        last_event INTEGER NOT NULL,
        count INTEGER NOT NULL,
        data BLOB NOT NULL,
        PRIMARY KEY (run_id, first_event)
    ) STRICT;
    """,
    """
    DROP TABLE step_blocks;
    CREATE TABLE step_blocks (
        run_id TEXT NOT NULL REFERENCES runs(run_id) ON DELETE CASCADE,
        kind TEXT NOT NULL,
        first_event INTEGER NOT NULL,
        last_event INTEGER NOT NULL,
        count INTEGER NOT NULL,
        data BLOB NOT NULL,
        PRIMARY KEY (run_id, kind, first_event)
    ) STRICT;
    """,
    # which history of runs this is, wherever it is copied to
    """
    CREATE TABLE history (id TEXT NOT NULL) STRICT;
    INSERT INTO history VALUES (lower(hex(randomblob(16))));
    """,
]


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the schema to the newest version; several processes may call this at once."""
    connection.execute("PRAGMA foreign_keys = ON")
    if connection.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
            for statement in script.split(";"):
                if statement.strip():
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
