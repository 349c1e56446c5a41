"""sagepatch: quantised attention for diffusers pipelines and transformers models, one line, layer
by layer, with proof.
"""

from sagepatch.functional import attention

__version__ = "0.1.0"
__all__ = ["attention"]
