"""From a journal to arrays and rows."""
