"""Kernel table of the chip: templates in order of preference."""

from tilewright.targets.nvidia.contract import CONTRACT
from tilewright.targets.nvidia.kernels import ATTEND, ROW

KERNELS = (CONTRACT, ATTEND, ROW)
