"""Every family of diffusers that the coverage tests build."""

from __future__ import annotations

from diffusers_controls import CONTROLS
from diffusers_flux import FLUX
from diffusers_images import IMAGES
from diffusers_unets import UNETS
from diffusers_videos import VIDEOS

FAMILIES = (*FLUX, *IMAGES, *VIDEOS, *UNETS, *CONTROLS)
