"""Many runs, each in its own process: the cells of a sweep, their order, and their outcomes.

May use ``processes``, ``report``, ``tensorboard``, ``analysis``, ``record`` and the presets of ``models.config``. Never
torch or Lightning: its cells import them.
"""
