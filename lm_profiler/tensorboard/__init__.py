"""What TensorBoard shows of a run: a tab of its own (``tab``), HPARAMS, TEXT and the layout of CUSTOM SCALARS.

May use TensorBoard, ``report``, ``analysis`` and ``record``. Never torch or Lightning.
"""
