"""Many runs, each in its own process: which cells there are, their order, and their outcomes.

May use ``processes``, ``report``, ``tensorboard``, ``analysis``, ``record`` and the presets of ``models.config``. Never
torch or Lightning: its cells import them.
"""
