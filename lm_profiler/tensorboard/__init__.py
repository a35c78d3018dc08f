"""What TensorBoard shows of a run: a tab of its own (``tab``), and scalars of its steps.

May use TensorBoard, ``report``, ``analysis`` and ``record``. Never torch or Lightning.
"""
