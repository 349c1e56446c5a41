"""sagepatch: quantised attention for diffusers pipelines and transformers models, with proof."""

from sagepatch.api import Patch, apply, calibrate, restore
from sagepatch.calibration.table import Calibration
from sagepatch.env import VERSION as __version__
from sagepatch.errors import SagepatchError
from sagepatch.functional import attention
from sagepatch.plan import Plan

__all__ = [
    "Calibration",
    "Patch",
    "Plan",
    "SagepatchError",
    "__version__",
    "apply",
    "attention",
    "calibrate",
    "restore",
]
