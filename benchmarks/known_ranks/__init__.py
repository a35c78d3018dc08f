"""Real ranks (gloo, on the CPU) whose every phase sleeps for a known time: what is said of them, against the truth.

``python -m benchmarks.known_ranks`` prints the known answers, ``python -m benchmarks.known_ranks.cost`` what the
instruments cost under DDP. Ranks sleep and do not spin, so that each behaves as if it had a device of its own, whatever
the number of cores.
"""
