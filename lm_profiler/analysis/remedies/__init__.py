"""The catalogue of remedies: what could make a step faster or smaller, what that may change, and its sentence.

``findings`` name a remedy, `improve` tries its options and `plan` rehearses them. May use ``record`` and ``plan`` of
this package. Never a run's objects, and never a second list of remedies.
"""
