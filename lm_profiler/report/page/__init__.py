"""The page of all runs in a browser: the list of runs, the script that draws it (``static``), and all in one file.

TensorBoard's tab sends the same list, views and script.

This package may import whatever ``report`` may import, plus ``views``, ``run``, ``tables`` and ``pictures``. It never
uses the network.
"""
