"""Readers of a finished (or running) run: tables and an HTML page from its journal."""
