"""The catalogue of remedies: what could make a step faster or smaller, what that may change, and its sentence.

``findings`` name a remedy, `improve` tries its options and `plan` rehearses them. This package may import ``record``
and ``analysis.plan``. It uses no objects of a run. There is no other list of remedies.
"""
