"""Kernel table of the chip: templates in order of preference."""

from tilewright.targets.nvidia.hopper_contract import CONTRACT_HOPPER, LINEAR
from tilewright.targets.nvidia.kernels import (
    ATTEND,
    LATENT,
    LATENT_HOPPER,
    ROW,
    SELECT,
    SELECT_HOPPER,
)
from tilewright.targets.nvidia.thin import THIN

KERNELS = (
    THIN, CONTRACT_HOPPER, LINEAR, ATTEND, LATENT_HOPPER, LATENT, SELECT_HOPPER, SELECT, ROW,
)  # fmt: skip
