"""Where a controller lives while a run goes on, whoever carries the messages: no Ray, no torch, no clock."""
