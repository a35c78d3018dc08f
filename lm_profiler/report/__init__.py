"""Printing: tables, pictures and the texts about one run.

This package may import ``analysis``, ``record`` and the presets of ``models.config``. It never imports torch or
Lightning.
"""
