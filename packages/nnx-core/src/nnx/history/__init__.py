"""Bounded history: a run's records in immutable chunks, read lazily.

``HistoryJournal`` asks for it, ``iter_history`` and ``export_history_csv`` read
any run's committed records, ``migrate_history`` moves a table into a journal.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "journal": ["JOURNAL_FORMAT", "HistoryJournal"],
        "lineage": ["export_history_csv", "iter_history"],
        "migration": ["migrate_history"],
        "reading": ["HistoryCorruptionError"],
    },
)
