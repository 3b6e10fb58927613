"""How often each judgement of the controller is wrong, measured in simulation: one module per part of a method."""
