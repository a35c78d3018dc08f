"""The pages that a browser shows: what they say (``answers``), how they draw it (``static``), and one file of all of it.

TensorBoard's tab asks for the same answers and sends the same modules. May use ``run`` and ``tables``. Never the network.
"""
