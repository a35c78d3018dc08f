"""The tab: a plugin that answers a browser's questions, and its pages (``static``).

May use werkzeug, and what ``tensorboard`` may. Never computes a figure, and never loads anything from the network.
"""
