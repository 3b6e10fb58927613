"""What people see of a run while it goes on: a pure fold of what the journal is told, and the words for it."""
