"""Which operators of a step are needed: what reads their results, what they compute again, what their operands hold.

May use what ``analysis`` may. Knows calls of operators by number and storage, and no tensors.
"""
