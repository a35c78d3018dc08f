"""TensorBoard's views of a run: our own tab (``tab``), HPARAMS and TEXT.

This package may import TensorBoard, ``report``, ``analysis`` and ``record``. It never imports torch or Lightning.
"""
