"""The controller: events in, commands out; step assembly; the journal's encoding. Pure."""
