"""Kernel table of the chip: templates in order of preference."""

from tilewright.targets.nvidia.contract import contract_template
from tilewright.targets.nvidia.kernels import ATTEND, LATENT, ROW, SELECT
from tilewright.targets.nvidia.thin import THIN

CORES = 148  # of a B200
KERNELS = (THIN, contract_template(CORES, in_memory=True), ATTEND, LATENT, SELECT, ROW)
