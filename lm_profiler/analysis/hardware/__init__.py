"""How close to the hardware: peaks with their sources, utilisation, what binds a step, what to try.

May use what ``analysis`` may. Never guesses: a device that no datasheet names has no peak.
"""
