"""What was erased while the server runs: where each erased turn had stood.

A turn that was being prepared when one before it was erased is stored after the erasure, and still
names what is gone. It is stored as if it had come first: after the turn that the erased one had
come after. Nothing but ids is kept, and only until the next start: what is being prepared does not
outlive the server.
"""

import sqlite3


def remember(db: sqlite3.Connection, response_id: str, parent_id: str | None) -> None:
    """The turn is being erased."""
    db.execute("INSERT OR REPLACE INTO erased VALUES (?, ?)", (response_id, parent_id))


def forget_all(db: sqlite3.Connection) -> None:
    """Nothing that was prepared before is still to be stored."""
    db.execute("DELETE FROM erased")


def standing(db: sqlite3.Connection, response_id: str | None) -> str | None:
    """The turn itself, or the nearest before it that was not erased; None: the beginning."""
    while response_id is not None:
        found = db.execute("SELECT parent_id FROM erased WHERE id = ?", (response_id,)).fetchone()
        if found is None:
            break
        response_id = found[0]
    return response_id
