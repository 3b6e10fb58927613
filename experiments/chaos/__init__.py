"""The whole control plane under random faults, in virtual time: ``python -m experiments.chaos --json FILE``.

The controller, its step assembler, its host and journal, the switch protocol, asked saves and sampler of every rank,
the outbox and the listener of its link and the search helper's two ends are the ones that run live; Ray, threads,
processes and the clock are simulated, and fail: messages are lost, doubled, late or of groups that are gone; the
control actor is killed at any byte of a write and between writing and telling, or is slow; the queue is lost or
flooded; the disk is full; the helper dies, falls silent, repeats itself; worker groups are lost and resized. ``laws``
holds what happens against the invariants of ``docs/architecture.md`` throughout, and in the end, when faults have
ceased for a while, the group must run what was decided last. A seed that breaks a law is named with the command that
repeats it and the fewest kinds of fault under which it still does.
"""
