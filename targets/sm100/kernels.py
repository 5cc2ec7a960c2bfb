"""Kernel table of the chip: templates in order of preference."""

from tilewright.targets.nvidia.contract import CONTRACT
from tilewright.targets.nvidia.kernels import ATTEND, LATENT, ROW, SELECT
from tilewright.targets.nvidia.thin import THIN

KERNELS = (THIN, CONTRACT, ATTEND, LATENT, SELECT, ROW)
