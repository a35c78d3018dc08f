"""TensorBoard's views of a run: our own tab (``tab``), HPARAMS and TEXT.

May use TensorBoard, ``report``, ``analysis`` and ``record``. Never torch or Lightning.
"""
