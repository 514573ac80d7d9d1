"""TorchRec's sharding, planner, fused optimizer and checkpoints with this library as the compute kernel.

``install()`` makes TorchRec build its ``FUSED`` and ``DENSE`` kernels over this library's operator, until its
result is closed. ``docs/torchrec.md`` says what is served and refused; ``planning`` gives TorchRec's planner this
library's measured speeds.
"""

from .seam import Installation, install

__all__ = ["Installation", "install"]
