"""Printing: tables, pictures and the texts about one run.

May use ``analysis``, ``record`` and the presets of ``models.config``. Never torch or Lightning.
"""
