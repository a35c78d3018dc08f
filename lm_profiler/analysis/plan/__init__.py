"""What a run would need before it runs, and what a device has.

May use ``record`` and the tables of ``hardware``. Never rehearses a step itself.
"""
