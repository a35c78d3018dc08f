"""The content of each view of TensorBoard's tab and of the HTML page, as ``blocks`` that the browser draws.

A view of a run is a file and a line of ``registry``.

This package may import whatever ``report`` may import, plus ``run``, ``tables`` and ``pictures``. It never uses the
network.
"""
