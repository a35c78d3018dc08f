"""Many runs, each in its own process: which cells there are, their order, and their outcomes.

It may use ``processes``, ``report``, ``tensorboard``, ``analysis``, ``record`` and the presets of ``models.config``. It
never imports torch or Lightning; its cells do.
"""
