"""Many runs, each in its own process: the cells of a sweep, their order, and their outcomes.

This package may import ``processes``, ``report``, ``tensorboard``, ``analysis``, ``record`` and the presets of
``models.config``. It never imports torch or Lightning: its cells import them.
"""
