"""Benchmarks of the embedding operator: the program behind ``tbe bench``.

``workloads`` names what is measured and ``inputs`` makes it, ``profile`` counts its runs and bytes;
``implementations`` and ``peers`` put ours and others' operators behind one protocol; ``gate`` refuses a
wrong result before ``measure`` times anything; ``runner`` drives a run, ``store`` keeps it and
``report``, ``plots`` and ``page`` show it. Nothing is imported here: ``import tbe`` and ``tbe --help``
stay fast.
"""
