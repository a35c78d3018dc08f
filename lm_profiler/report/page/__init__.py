"""The pages that a browser shows: what they say (``answers``), how they draw it (``static``), and both in one file.

TensorBoard's tab asks for the same answers and sends the same modules.

May use what ``report`` may, ``run``, ``tables`` and ``pictures``. Never the network.
"""
