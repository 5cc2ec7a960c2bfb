"""Kernel table of the chip: templates in order of preference."""

from tilewright.targets.nvidia.kernels import ATTEND, CONTRACT, LATENT, ROW, SELECT

KERNELS = (CONTRACT, ATTEND, LATENT, SELECT, ROW)
