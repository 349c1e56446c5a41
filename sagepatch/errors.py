"""The errors that sagepatch raises on purpose, each with the exit code that the command line gives
it.
"""

from __future__ import annotations

from collections.abc import Sequence


class SagepatchError(Exception):
    """Base of every deliberate error. A caller can show its text to a user as it stands.

    `exit_code` is what the command line returns: 1 a fault of ours, 2 usage, 3 model, network,
    environment or nothing patched, 4 a plan or variant refused.
    """

    exit_code = 1


class InvalidArgument(SagepatchError, ValueError):
    """An argument that no kernel could honour; the text names what was found and what is needed."""

    exit_code = 2


class ModelError(SagepatchError):
    """A model that cannot be found, loaded or reached."""

    exit_code = 3


class NothingPatched(ModelError):
    """`apply` met no attention that it can serve; the text lists what it found instead."""


class MachineError(SagepatchError):
    """The machine lacks something that was asked for: a GPU, a package, a driver, disk space."""

    exit_code = 3


class KernelUnavailable(MachineError):
    """A kernel that did not compile, or does not fit this GPU: found before its launch, so nothing
    was written.
    """


class PlanError(SagepatchError):
    """A plan that does not fit: another model, an unknown site, a newer schema, a damaged file."""

    exit_code = 4


class VariantRefused(SagepatchError):
    """An explicitly requested kernel cannot serve the call; `reasons` holds all of why, `told` is
    the same for a reader, where it is shorter.
    """

    exit_code = 4

    def __init__(self, request: str, reasons: Sequence[str], told: str = "") -> None:
        self.request = request
        self.reasons = tuple(reasons)
        self.told = told
        listed = told or "; ".join(self.reasons) or "no kernel of that name exists"
        super().__init__(f"variant {request!r} cannot serve this call: {listed}")


class UnknownVariant(VariantRefused, ValueError):
    """A name that is no tier, recipe or kernel."""


class StrictFallback(VariantRefused):
    """A patched layer would have run exact attention under `strict=True`."""

    def __init__(self, site: str, request: str, reasons: Sequence[str], told: str = "") -> None:
        self.site = site
        told = told or "; ".join(reasons)
        super().__init__(request, reasons, f"layer {site!r}: {told}")
