"""Bounded history: a run's records in immutable chunks, read lazily.

``HistoryJournal`` asks for it, ``iter_history`` and ``export_history_csv`` read
any run's committed records, ``migrate_history`` moves a table into a journal.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
