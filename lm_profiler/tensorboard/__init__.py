"""What TensorBoard shows of a run: a tab of its own (``tab``), HPARAMS and TEXT.

May use TensorBoard, ``report``, ``analysis`` and ``record``. Never torch or Lightning.
"""
