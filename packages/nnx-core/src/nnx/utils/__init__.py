"""Small helpers at the bottom of core: files, locks, JSON-like values, tables."""
