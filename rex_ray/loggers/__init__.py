"""Where what is seen of a run goes: the terminal, and the trackers that people use. One per job, in the driver."""
