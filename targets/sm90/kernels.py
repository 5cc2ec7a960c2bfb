"""Kernel table of the chip: templates in order of preference."""

from tilewright.targets.nvidia.contract import CONTRACT
from tilewright.targets.nvidia.kernels import ATTEND, LATENT, LATENT_HOPPER, ROW, SELECT

KERNELS = (CONTRACT, ATTEND, LATENT_HOPPER, LATENT, SELECT, ROW)
