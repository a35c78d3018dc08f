"""The page of all runs in a browser: the list of runs, the script that draws it (``static``), and all in one file.

TensorBoard's tab sends the same list, views and script.

May use what ``report`` may, ``views``, ``run``, ``tables`` and ``pictures``. Never the network.
"""
