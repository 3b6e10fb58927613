"""Looking for better shares than the exact split's, in a process of its own; only ``ax_proposer`` knows of Ax."""
