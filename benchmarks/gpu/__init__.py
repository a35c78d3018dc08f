"""The GPU paths, proven by one command: ``python -m benchmarks.gpu`` (``make gpu``).

``registry`` lists the parts, each a module of ``parts``; ``runner`` runs them one by one, each in a process of its own
with a time limit; a part writes what it finds through ``findings`` as soon as it knows it. What was measured so far on
a GPU stands in ``results/``, a folder a machine.
"""
