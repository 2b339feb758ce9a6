from .journal import HistoryJournal as HistoryJournal
from .journal import JOURNAL_FORMAT as JOURNAL_FORMAT
from .lineage import export_history_csv as export_history_csv
from .lineage import iter_history as iter_history
from .migration import migrate_history as migrate_history
from .reading import HistoryCorruptionError as HistoryCorruptionError
