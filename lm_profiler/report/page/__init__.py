"""The pages in a browser: their content (``answers``), their drawing (``static``), and both in one file.

TensorBoard's tab asks for the same answers and sends the same modules.

May use what ``report`` may, ``run``, ``tables`` and ``pictures``. Never the network.
"""
