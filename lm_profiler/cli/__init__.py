"""The command line of the Trainer's verbs: reading it, checking it, running it, and how it ends."""
