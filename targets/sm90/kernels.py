"""Kernel table of the chip: templates in order of preference."""

from tilewright.targets.nvidia.kernels import ATTEND, CONTRACT, LATENT, ROW

KERNELS = (CONTRACT, ATTEND, LATENT, ROW)
