"""Kernel table of the chip: templates in order of preference."""

from tilewright.targets.nvidia.kernels import ATTEND, CONTRACT, ROW

KERNELS = (CONTRACT, ATTEND, ROW)
