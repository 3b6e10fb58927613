"""Vocabulary and mathematics. Pure: no clock, no files, no randomness, no torch, no Ray.

Names are imported from their modules: the vocabulary (``types``, ``observations``, ``errors``) and ``apportion`` need
NumPy alone, and a worker process should not load SciPy for the sake of the others.

* ``apportion``: whole rows from fractional shares; the rows of a partial batch.
* ``curves``, ``kind_fit``, ``step_time``: own time as a function of rows, its fit, and the book of what was measured.
* ``split``: the exact min-max split on such curves.
* ``noise_scale``, ``lr_scaling``, ``goodput``: how large a batch pays, and the learning rate that goes with it.
"""
