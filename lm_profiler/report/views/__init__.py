"""The content of each view of TensorBoard's tab and of the HTML page, as ``blocks`` that the browser draws.

A view of a run is a file and a line of ``registry``.

May use what ``report`` may, ``run``, ``tables`` and ``pictures``. Never the network.
"""
