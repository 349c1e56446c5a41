"""sagepatch: quantised attention for diffusers pipelines and transformers models, with proof."""

from sagepatch.api import Patch, apply, calibrate, restore
from sagepatch.calibration.table import Calibration
from sagepatch.errors import SagepatchError
from sagepatch.functional import attention
from sagepatch.plan import Plan

__version__ = "0.1.0"
__all__ = [
    "Calibration",
    "Patch",
    "Plan",
    "SagepatchError",
    "apply",
    "attention",
    "calibrate",
    "restore",
]
