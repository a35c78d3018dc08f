"""Many runs: what is to run, in which order, in processes of their own, and what became of them.

May use ``processes``, ``report``, ``tensorboard``, ``analysis``, ``record`` and the presets of ``models.config``. Never
torch or Lightning: its cells import them.
"""
